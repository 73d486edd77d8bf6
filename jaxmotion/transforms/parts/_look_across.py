"""Search for updates that look across the elements of a worker's part."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.program import (
  COLLECTIVES,
  CUMULATIVE,
  REDUCTIONS,
  WINDOWS,
  Operand,
  Step,
  Value,
  collective_name,
  flatten,
  inner_jaxprs,
)

# One element of the result depends on several of an operand.
_ACROSS = (
  REDUCTIONS
  | CUMULATIVE
  | WINDOWS
  | frozenset(
    """
    approx_top_k cholesky conv_general_dilated custom_linear_solve dot_general
    eig eigh fft hessenberg householder_product lu qr schur sort svd top_k
    triangular_solve tridiagonal tridiagonal_solve
    """.split()
  )
)


class _Mark(NamedTuple):
  """Origin of a value.

  Attributes:
    is_own: whether it is computed from a worker's part of a leaf.
    across: the operation that combined elements of the part alone, or "".
  """

  is_own: bool
  across: str


def find_across(
  update: Callable[..., PyTree],
  args: tuple[PyTree, ...],
  own: Sequence[bool],
  axis_name: AxisName,
) -> str:
  """Returns words for a leaf of an update that combines elements of a part.

  >>> mean = lambda x: {"w": x - x.mean(), "b": 2 * x}
  >>> find_across(mean, (jax.numpy.ones(3),), [True], "data")
  '`w` by reduce_sum'
  """
  # A sum over a worker's part is the part's own, until it is added up over the
  # workers. So the update would be another one than that of the whole leaf.
  # own: for each leaf of the arguments whether it is a worker's part. Returns
  # "" if there is no such leaf.
  jaxpr, shape = jax.make_jaxpr(update, return_shape=True)(*args)
  marks = _follow(jaxpr, [_Mark(is_own, "") for is_own in own], axis_name)
  for (path, _), mark in zip(core.named_leaves(shape), marks, strict=True):
    if mark.across:
      return f"`{path}` by {mark.across}"
  return ""


def _follow(
  jaxpr: Any, marks: Sequence[_Mark], axis_name: AxisName
) -> list[_Mark]:
  """Returns the marks of a program's results from those of its arguments."""
  program = flatten(jaxpr, calls="all")
  known = {id(v): mark for v, mark in zip(program.inputs, marks, strict=True)}

  def read(operand: Operand) -> _Mark:
    value = known.get(id(operand))
    if value is None and isinstance(operand, Value):
      value = known.get(id(operand.source))  # A view of what is marked.
    return value or _Mark(False, "")

  for step in program.steps:
    results = _mark_results(step, [read(v) for v in step.ins], axis_name)
    known |= {
      id(out): mark for out, mark in zip(step.outs, results, strict=True)
    }
  return [read(v) for v in program.outputs]


def _mark_results(
  step: Step, marks: list[_Mark], axis_name: AxisName
) -> list[_Mark]:
  """Returns the marks of the results of one step."""
  count = len(step.outs)
  name = collective_name(step.name)
  if name in COLLECTIVES and set(core.axis_names(axis_name)) <= set(
    step.axis_names
  ):
    return [_Mark(False, "")] * count
  if name == "optimization_barrier":
    return marks  # Each result is the operand at its place.
  is_own, across = _join(marks)
  if name == "cond" and not marks[0].across:
    branches = [
      _follow(b, marks[1:], axis_name) for b in inner_jaxprs(step.eqn)
    ]
    return [_join(found) for found in zip(*branches, strict=True)]
  if name == "scan" and not across:
    (body,) = inner_jaxprs(step.eqn)
    return _follow(body, marks, axis_name)
  if is_own and not across:
    across = _first_across(step)
  return [_Mark(is_own, across)] * count


def _join(marks: Sequence[_Mark]) -> _Mark:
  """Returns the mark of a value that depends on several."""
  across = next((mark.across for mark in marks if mark.across), "")
  return _Mark(any(mark.is_own for mark in marks), across)


def _first_across(step: Step) -> str:
  """Returns the first operation of a step that combines elements, or ""."""
  if step.name in _ACROSS:
    return step.name
  inner = (flatten(jaxpr, calls="all") for jaxpr in inner_jaxprs(step.eqn))
  steps = (s for program in inner for s in program.steps)
  return next(filter(None, map(_first_across, steps)), "")
