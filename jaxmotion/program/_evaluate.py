"""Order and evaluation of the steps of a flat program."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from jaxmotion import core
from jaxmotion.program import _flatten, _primitives


class Order:
  """Indexes the steps of a program by the values that they make."""

  def __init__(self, steps: Sequence[_flatten.Step]):
    self._steps = steps
    self._index = {step: i for i, step in enumerate(steps)}
    self._maker = {v: i for i, step in enumerate(steps) for v in step.outs}

  def maker(self, value: _flatten.Value) -> _flatten.Step | None:
    """Returns the step that makes a value; None of an input."""
    index = self._maker.get(value)
    return None if index is None else self._steps[index]

  def leading_to(
    self,
    wanted: Iterable[_flatten.Operand],
    known: Container[_flatten.Value],
    also: Iterable[_flatten.Step] = (),
  ) -> list[_flatten.Step]:
    """Returns the steps from known values to wanted ones, in program order."""
    # wanted: literals are ignored. also: steps without results that are to run,
    # such as debug prints.
    found = {self._index[step] for step in also}
    todo = [v for v in wanted if isinstance(v, _flatten.Value)]
    todo += [v for i in found for v in self._steps[i].reads]
    while todo:
      value = todo.pop()
      index = self._maker.get(value)
      if value in known or index is None or index in found:
        continue
      found.add(index)
      todo.extend(self._steps[index].reads)
    return [self._steps[i] for i in sorted(found)]

  def follows_cheaply(
    self, value: _flatten.Value, known: Container[_flatten.Value]
  ) -> bool:
    """Says whether cheap steps alone make a value that is not there yet."""
    # False of an input, and of a value that is known.
    if value in known or value not in self._maker:
      return False
    seen: set[_flatten.Value] = set()
    todo = [value]
    while todo:
      one = todo.pop()
      if one in known or one in seen or one not in self._maker:
        continue
      step = self._steps[self._maker[one]]
      if _primitives.is_expensive(step.eqn):
        return False
      seen.add(one)
      todo.extend(step.reads)
    return True


def evaluate(
  steps: Sequence[_flatten.Step], env: dict[_flatten.Value, Any]
) -> None:
  """Runs or traces steps in order, and adds what they make to `env`."""
  # env: holds all that the steps read before they make it. A value that is
  # there already stays.
  for step in steps:
    results = step.run([read_operand(env, v) for v in step.ins])
    for value, result in zip(step.outs, results, strict=True):
      env.setdefault(value, result)


def read_operand(
  env: dict[_flatten.Value, Any], operand: _flatten.Operand
) -> Any:
  """Returns the array of an operand."""
  return (
    operand.val if isinstance(operand, core.jax_core.Literal) else env[operand]
  )
