"""Marker of arrays of which every worker holds its own part."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmotion.core import _compat, _types


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split:
  """Arrays that are cut between the workers, such as sharded moments.

  Outside of `shard_map` every leaf is one ordinary array, sharded along one of
  its dimensions; inside, a leaf is this worker's part of it.

  Attributes:
    value: pytree of arrays.
    dimensions: for each leaf the dimension that is cut, or None for a leaf
      that all workers hold whole.
    axes: mesh axes that the dimensions are cut along, the major one first.
    shards: for each leaf its partition spec over other axes of the mesh, those
      of the model; empty if there are none.

  Example:
    >>> moments = Split(jnp.zeros((8, 3)), dimensions=(0,), axes=("data",))
    >>> moments.specs().value
    P('data',)
  """

  value: _types.PyTree
  dimensions: tuple[int | None, ...] = dataclasses.field(
    metadata={"static": True}
  )
  axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
  shards: tuple[PartitionSpec, ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )

  def specs(self, axes: Collection[str] | None = None) -> "Split":
    """Returns the partition spec of every leaf, in the same structure.

    Args:
      axes: axes of the mesh that specs may name; None is all.
    """
    treedef: Any = jax.tree.structure(self)
    shards = self.shards or (PartitionSpec(),) * len(self.dimensions)
    return treedef.unflatten(
      [
        self._leaf_spec(dimension, shard, axes)
        for dimension, shard in zip(self.dimensions, shards, strict=True)
      ]
    )

  def _leaf_spec(
    self,
    dimension: int | None,
    shard: PartitionSpec,
    axes: Collection[str] | None,
  ) -> PartitionSpec:
    entries = list(map(_compat.spec_axes, shard))
    if dimension is not None:
      entries += [()] * (dimension + 1 - len(entries))
      # Workers are major: what is one of them holds a contiguous part.
      entries[dimension] = (*self.axes, *entries[dimension])
    kept = [
      tuple(n for n in entry if axes is None or n in axes) for entry in entries
    ]
    while kept and not kept[-1]:
      kept.pop()
    return PartitionSpec(*(entry or None for entry in kept))
