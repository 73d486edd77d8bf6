"""Ways in which a loss reads its parameters, found in its trace."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmotion import core
from jaxmotion.core import PyTree
from jaxmotion.program import VIEWS, Operand, Value, flatten

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
  uses: list[set[str]] = [set() for _ in names]
  count = len(jaxpr.in_avals) - len(names)
  _collect_uses(jaxpr, [*range(len(names)), *[None] * count], uses)
  return ParamUses(
    tuple(n for n, own in zip(names, uses, strict=True) if own == {"rows"}),
    tuple(n for n, own in zip(names, uses, strict=True) if "stack" in own),
  )


def _collect_uses(
  jaxpr: Any, args: Sequence[int | None], uses: list[set[str]]
) -> None:
  """Adds how a program, and the loops in it, read the parameters."""
  # args: position of the parameter that each argument is, or None. uses: for
  # each parameter the ways in which it is read: "rows" by their index, "stack"
  # taken apart by a loop, or "whole".
  program = flatten(jaxpr, calls="all")
  positions = dict(zip(program.inputs, args, strict=True))

  def find_position(operand: Operand) -> int | None:
    """Returns the position of the parameter that an operand is a view of."""
    if not isinstance(operand, Value):
      return None
    return positions.get(operand, positions.get(operand.source))

  def add_use(kind: str, read: Sequence[int | None]) -> None:
    for position in read:
      if position is not None:
        uses[position].add(kind)

  for step in program.steps:
    read = [find_position(v) for v in step.ins]
    if step.name == "scan":
      body, constants, carried = core.scan_parts(step.params)
      add_use("stack", read[constants + carried :])
      # The body sees constants as they are; a carry changes, and of what is
      # stacked it sees a row.
      rest = [None] * (len(read) - constants)
      _collect_uses(body, [*read[:constants], *rest], uses)
      add_use("whole", read[constants : constants + carried])
    elif step.name in _COPIES:
      # The first operand is the array that is viewed.
      positions.update(zip(step.outs, read, strict=False))
    else:
      tables = 1 if step.name == "gather" else 0
      add_use("rows", read[:tables])
      add_use("whole", read[tables:])
