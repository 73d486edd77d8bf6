"""Optimizer that runs on each worker's part of the parameters."""

from typing import Any

import jax
import optax

from jaxmotion.core import (
  AxisName,
  PyTree,
  Split,
  axis_names,
  is_varying,
  named_leaves,
  to_varying,
)
from jaxmotion.transforms._look_across import find_across
from jaxmotion.transforms._shard_layout import LeafCut, find_dimensions


def init_parts(
  tx: optax.GradientTransformation,
  parts: PyTree,
  cuts: list[LeafCut],
  workers: AxisName,
) -> Split:
  """Returns the state of an optimizer of this worker's part.

  Args:
    tx: treats every element by itself.
    parts: this worker's part of the parameters.
    cuts: division of each leaf.
    workers: the axes of all workers.
  """
  state = tx.init(parts)
  dimensions = find_dimensions(tx.init, parts, cuts)
  # A scale of a short leaf has the same shape, and yet differs by worker.
  dimensions = tuple(
    0 if dimension is None and x.ndim and is_varying(x, workers) else dimension
    for x, dimension in zip(jax.tree.leaves(state), dimensions, strict=True)
  )
  return mark_parts(state, dimensions, workers, "tx.init")


def update_parts(
  tx: optax.GradientTransformationExtraArgs,
  grads: PyTree,
  state: Split,
  parts: PyTree,
  own: list[bool],
  workers: AxisName,
  extra_args: dict[str, Any],
) -> tuple[PyTree, Split]:
  """Returns the changes of this worker's part, and the new state.

  Args:
    tx: treats every element by itself.
    grads: this worker's part of the mean gradient.
    state: what `init_parts` returned.
    parts: this worker's part of the parameters.
    own: for each leaf whether it is cut.
    workers: the axes of all workers.
    extra_args: what the update takes besides.

  Raises:
    ValueError: the update looks across the elements of a leaf.
  """

  def update(grads: PyTree, state: PyTree, parts: PyTree) -> Any:
    return tx.update(grads, state, parts, **extra_args)

  of_state = [dimension is not None for dimension in state.dimensions]
  found = find_across(
    lambda *args: update(*args)[0],
    (grads, state.value, parts),
    [*own, *of_state, *own],
    workers,
  )
  if found:
    raise _across_error(f"`tx.update` computes {found}")
  changes, new = update(grads, state.value, parts)
  for (path, x), is_own in zip(named_leaves(changes), own, strict=True):
    if not is_own and is_varying(x, workers):
      raise _across_error(f"`tx.update` changed `{path}`")
  return changes, mark_parts(new, state.dimensions, workers, "tx.update")


def mark_parts(
  tree: PyTree,
  dimensions: tuple[int | None, ...],
  workers: AxisName,
  source: str = "",
) -> Split:
  """Marks arrays as cut; raises if one that is whole differs by worker.

  Args:
    tree: arrays of this worker.
    dimensions: for each the dimension that is cut, or None.
    workers: the axes of all workers.
    source: function that made the arrays, for the message.
  """
  values = jax.tree.leaves(tree)
  treedef: Any = jax.tree.structure(tree)
  for (path, x), dimension in zip(named_leaves(tree), dimensions, strict=True):
    if dimension is None and is_varying(x, workers):
      raise _across_error(f"`{source}` returned `{path}`")
  values = [
    x if dimension is None else to_varying(x, workers)
    for x, dimension in zip(values, dimensions, strict=True)
  ]
  return Split(treedef.unflatten(values), dimensions, axis_names(workers))


def _across_error(found: str) -> ValueError:
  return ValueError(
    "`tx` must treat every element of a leaf by itself, because each worker has"
    f" a part of a leaf only, but {found} of a part alone: take"
    " `jaxmotion.transforms.clip_by_global_norm` for that of optax, and"
    " `jaxmotion.exchange` for optimizers that look across a leaf."
  )
