"""Search for updates that look across the elements of a worker's part."""

from collections.abc import Callable, Sequence

import jax

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.program import (
  COLLECTIVES,
  CUMULATIVE,
  REDUCTIONS,
  WINDOWS,
  Step,
  collective_name,
  flatten,
  follow_marks,
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
# Mark of a value that is computed from a worker's part. Other marks name the
# operations that combined elements of the part alone.
_OWN = ""
_Marks = frozenset[str]


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
  names = set(core.axis_names(axis_name))

  def mark_results(step: Step, ins: Sequence[_Marks]) -> Sequence[_Marks]:
    name, marks = collective_name(step.name), frozenset().union(*ins)
    if name == "optimization_barrier":
      return ins  # Each result is the operand at its place.
    if name in COLLECTIVES and names <= set(step.axis_names):
      marks = frozenset()
    elif marks == {_OWN}:
      marks |= {_first_across(step)}  # It stays `_OWN` without one.
    return [marks] * len(step.outs)

  first = [_Marks([_OWN] if is_own else []) for is_own in own]
  found = follow_marks(jaxpr, first, mark_results)
  for (path, _), marks in zip(core.named_leaves(shape), found, strict=True):
    if across := marks - {_OWN}:
      return f"`{path}` by {min(across)}"
  return ""


def _first_across(step: Step) -> str:
  """Returns the first operation of a step that combines elements, or ""."""
  if step.name in _ACROSS:
    return step.name
  inner = (flatten(jaxpr, calls="all") for jaxpr in inner_jaxprs(step.eqn))
  steps = (s for program in inner for s in program.steps)
  return next(filter(None, map(_first_across, steps)), "")
