"""Optimizer that runs on each worker's part of the parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _model_axes
from jaxmotion.transforms.parts import _look_across, _shard_layout


def init_parts(
  tx: optax.GradientTransformation,
  parts: PyTree,
  cuts: Sequence[_shard_layout.LeafCut],
  workers: AxisName,
  model: _model_axes.ModelAxes,
) -> core.Split:
  """Returns the state of an optimizer of this worker's part."""
  state = tx.init(parts)
  leaves = jax.tree.leaves(state)
  dimensions = _shard_layout.find_dimensions(tx.init, parts, cuts)
  # A scale of a short leaf has the same shape, and yet differs by worker.
  dimensions = tuple(
    0
    if dimension is None and x.ndim and core.is_varying(x, workers)
    else dimension
    for x, dimension in zip(leaves, dimensions, strict=True)
  )
  shards: list[PartitionSpec] = []
  if model.names:
    found = _shard_layout.find_shards(
      tx.init, parts, model.leaf_specs(len(cuts))
    )
    for x, entries in zip(leaves, found, strict=True):
      used = _model_axes.sharded_axes(PartitionSpec(*entries.values()))
      left = [n for n in model.names if n in core.varying_axes(x) - used]
      if left and x.ndim and 0 not in entries:
        entries[0] = tuple(left)
      width = max(entries, default=-1) + 1
      shards.append(PartitionSpec(*map(entries.get, range(width))))
  return mark_parts(state, dimensions, shards, workers, "tx.init")


def update_parts(
  tx: optax.GradientTransformationExtraArgs,
  grads: PyTree,
  state: core.Split,
  parts: PyTree,
  cuts: Sequence[_shard_layout.LeafCut],
  workers: AxisName,
  extra_args: dict[str, Any],
  model: _model_axes.ModelAxes,
) -> tuple[PyTree, core.Split]:
  """Returns the changes of this worker's part, and the new state."""

  def update(grads: PyTree, state: PyTree, parts: PyTree) -> Any:
    return tx.update(grads, state, parts, **extra_args)

  names = core.axis_names(workers)
  # The axes that divide each leaf.
  of_parts = [
    _model_axes.sharded_axes(spec).union(names if cut.is_cut else ())
    for cut, spec in zip(cuts, model.leaf_specs(len(cuts)), strict=True)
  ]
  of_state = map(_model_axes.sharded_axes, jax.tree.leaves(state.specs()))
  divided = [*of_parts, *of_state, *of_parts]
  for axes in (names, *((name,) for name in model.names)):
    marks = [axes[0] in divides for divides in divided]
    found = _look_across.find_across(
      lambda *args: update(*args)[0], (grads, state.value, parts), marks, axes
    )
    if found:
      raise _across_error(f"`tx.update` computes {found}")
  changes, new = update(grads, state.value, parts)
  for (path, x), divides in zip(
    core.named_leaves(changes), of_parts, strict=True
  ):
    if core.varying_axes(x) & ({*names, *model.names} - divides):
      raise _across_error(f"`tx.update` changed `{path}`")
  return changes, mark_parts(
    new, state.dimensions, state.shards, workers, "tx.update"
  )


def mark_parts(
  tree: PyTree,
  dimensions: tuple[int | None, ...],
  shards: Sequence[PartitionSpec],
  workers: AxisName,
  source: str = "",
) -> core.Split:
  """Marks arrays as cut; raises if one that is whole differs by worker."""
  values = jax.tree.leaves(tree)
  treedef: Any = jax.tree.structure(tree)
  for (path, x), dimension in zip(
    core.named_leaves(tree), dimensions, strict=True
  ):
    if dimension is None and core.is_varying(x, workers):
      raise _across_error(f"`{source}` returned `{path}`")
  values = [
    x if dimension is None else core.to_varying(x, workers)
    for x, dimension in zip(values, dimensions, strict=True)
  ]
  return core.Split(
    treedef.unflatten(values),
    dimensions,
    core.axis_names(workers),
    tuple(shards),
  )


def _across_error(found: str) -> ValueError:
  return ValueError(
    "`tx` must treat every element of a leaf by itself, because each worker has"
    f" a part of a leaf only, but {found} of a part alone: take"
    " `jaxmotion.transforms.clip_by_global_norm` for that of optax, put"
    " `jaxmotion.delayed` around `jaxmotion.sharded`, and take"
    " `jaxmotion.exchange` for optimizers that look across a leaf."
  )
