"""A function as one flat list of steps, and the evaluation of parts of it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxmotion.core import closed_jaxpr

# Where a jitted function begins and ends means nothing.
_CALLS = {
  "jit": "jaxpr",
  "pjit": "jaxpr",
  "closed_call": "call_jaxpr",
  "core_call": "call_jaxpr",
}


class Value:
  """One array of a program.

  Attributes:
    aval: its shape, its dtype and the mesh axes over which it varies.
  """

  __slots__ = ("aval",)

  def __init__(self, aval: Any):
    self.aval = aval


Operand = Value | core.Literal


class Step(NamedTuple):
  """One operation.

  Attributes:
    eqn: what it does.
    ins: operands.
    outs: results.
  """

  eqn: core.JaxprEqn
  ins: tuple[Operand, ...]
  outs: tuple[Value, ...]

  @property
  def name(self) -> str:
    """Name of the primitive."""
    return self.eqn.primitive.name

  def reads(self) -> Iterable[Value]:
    """The operands that are no constants of the program's text."""
    return (v for v in self.ins if isinstance(v, Value))

  def run(self, operands: Sequence[Any]) -> Sequence[Any]:
    """Does it, or traces it."""
    primitive = self.eqn.primitive
    with self.eqn.ctx.manager:
      params = primitive.get_bind_params(self.eqn.params)
      out = primitive.bind(*operands, **params)
    return out if primitive.multiple_results else [out]


class Program(NamedTuple):
  """A flat program.

  Attributes:
    inputs: arguments.
    steps: operations, in order.
    outputs: results.
    constants: arrays that are part of it.
  """

  inputs: tuple[Value, ...]
  steps: tuple[Step, ...]
  outputs: tuple[Operand, ...]
  constants: dict[Value, Any]


def trace(fn: Callable[..., Any], *args: Any) -> Program:
  """Traces a function of arrays and writes the calls in it out.

  Args:
    fn: takes and returns flat sequences of arrays.
    *args: arrays, tracers or ShapeDtypeStructs.
  """
  return flatten(jax.make_jaxpr(fn)(*args))


def flatten(closed: core.ClosedJaxpr) -> Program:
  """Writes the calls in a traced function out."""
  constants: dict[Value, Any] = {}
  steps: list[Step] = []
  inputs = tuple(Value(v.aval) for v in closed.jaxpr.invars)
  outputs = _inline(closed, inputs, steps, constants)
  return Program(inputs, tuple(steps), tuple(outputs), constants)


def _inline(
  closed: core.ClosedJaxpr,
  ins: Sequence[Operand],
  steps: list[Step],
  constants: dict[Value, Any],
) -> list[Operand]:
  jaxpr = closed.jaxpr
  env: dict[core.Var, Operand] = dict(zip(jaxpr.invars, ins, strict=True))
  for var, constant in zip(jaxpr.constvars, closed.consts, strict=True):
    value = env[var] = Value(var.aval)
    constants[value] = constant

  def read(atom: Any) -> Operand:
    return atom if isinstance(atom, core.Literal) else env[atom]

  for eqn in jaxpr.eqns:
    operands = tuple(map(read, eqn.invars))
    if (key := _CALLS.get(eqn.primitive.name)) is not None:
      inner = closed_jaxpr(eqn.params[key])
      outs = _inline(inner, operands, steps, constants)
    else:
      made = tuple(Value(v.aval) for v in eqn.outvars)
      steps.append(Step(eqn, operands, made))
      outs = list(made)
    env.update(zip(eqn.outvars, outs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


class Order:
  """Which steps lead to which values.

  Args:
    steps: in order.
  """

  def __init__(self, steps: Sequence[Step]):
    self._steps = steps
    self._maker = {v: i for i, step in enumerate(steps) for v in step.outs}

  def maker(self, value: Value) -> Step | None:
    """Returns the step that makes a value; None of an input."""
    place = self._maker.get(value)
    return None if place is None else self._steps[place]

  def leading_to(
    self, wanted: Iterable[Operand], known: Container[Value]
  ) -> list[Step]:
    """Returns the steps from known values to wanted ones, in order."""
    found: set[int] = set()
    todo = [v for v in wanted if isinstance(v, Value)]
    while todo:
      value = todo.pop()
      place = self._maker.get(value)
      if value in known or place is None or place in found:
        continue
      found.add(place)
      todo.extend(self._steps[place].reads())
    return [self._steps[i] for i in sorted(found)]


def evaluate(steps: Sequence[Step], env: dict[Value, Any]) -> None:
  """Runs steps; `env` has what they read and gets what they make."""
  for step in steps:
    results = step.run([read(env, v) for v in step.ins])
    for value, result in zip(step.outs, results, strict=True):
      env.setdefault(value, result)


def read(env: dict[Value, Any], operand: Operand) -> Any:
  """Returns the array of an operand."""
  return operand.val if isinstance(operand, core.Literal) else env[operand]
