"""Ways in which a loss reads its parameters, found in its trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmotion import core
from jaxmotion.core import PyTree
from jaxmotion.program import VIEWS, Operand, Step, Value, flatten

# Their result is the operand or a view of it.
_COPIES = VIEWS | {"convert_element_type"}


class ParamUses(NamedTuple):
  """Parameters that a loss reads in a special way.

  Args:
    looked_up: paths of tables of which the loss reads rows by their index, and
      nothing else. Gradients of all other rows are zero.
    stacked: paths of arrays that a loop takes apart along their first axis,
      such as the kernels of all layers.

  Example:
    >>> table = jax.ShapeDtypeStruct((9, 4), "float32")
    >>> ids = jax.ShapeDtypeStruct((3,), "int32")
    >>> find_uses(lambda p, ids: p["rows"][ids].sum(), {"rows": table}, (ids,))
    ParamUses(looked_up=('rows',), stacked=())
  """

  looked_up: tuple[str, ...] = ()
  stacked: tuple[str, ...] = ()


def find_uses(
  loss_fn: Callable[..., Any], params: PyTree, batch: tuple[PyTree, ...]
) -> ParamUses:
  """Finds parameters that `loss_fn(params, *batch)` looks up or takes apart."""
  names = [path for path, _ in core.named_leaves(params)]
  jaxpr = jax.make_jaxpr(loss_fn)(params, *batch)
  kinds: list[set[str]] = [set() for _ in names]
  count = len(jaxpr.in_avals) - len(names)
  _collect(jaxpr, [*range(len(names)), *[None] * count], kinds)
  return ParamUses(
    tuple(n for n, k in zip(names, kinds, strict=True) if k == {"rows"}),
    tuple(n for n, k in zip(names, kinds, strict=True) if "stack" in k),
  )


def _collect(
  jaxpr: Any, positions: Sequence[int | None], kinds: list[set[str]]
) -> None:
  """Adds how a program reads the parameters among its arguments."""
  # positions: for each argument the position of the parameter that it is, or
  # None. kinds: for each parameter the ways in which it is read: "rows" by
  # their index, "stack" taken apart by a loop, or "whole".
  program = flatten(jaxpr, calls="all")
  known = {
    id(v): i
    for v, i in zip(program.inputs, positions, strict=True)
    if i is not None
  }

  def find(operand: Operand) -> int | None:
    if not isinstance(operand, Value):
      return None
    return known.get(id(operand), known.get(id(operand.source)))

  for step in program.steps:
    read = [find(v) for v in step.ins]
    if step.name == "scan":
      _collect_scan(step, read, kinds)
    elif step.name in _COPIES:
      for i, out in zip(read, step.outs, strict=False):
        if i is not None:
          known[id(out)] = i
    else:
      for place, i in enumerate(read):
        if i is not None:
          is_table = step.name == "gather" and place == 0
          kinds[i].add("rows" if is_table else "whole")


def _collect_scan(
  step: Step, read: list[int | None], kinds: list[set[str]]
) -> None:
  """Adds how a loop reads the parameters among its operands."""
  body, constants, carried = core.scan_parts(step.params)
  for i in read[constants + carried :]:
    if i is not None:
      kinds[i].add("stack")
  rest = [None] * (len(read) - constants)
  _collect(body, [*read[:constants], *rest], kinds)
  for i in read[constants : constants + carried]:
    if i is not None:
      kinds[i].add("whole")
