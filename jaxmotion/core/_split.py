"""Marker of arrays of which every worker holds its own part."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmotion.core._types import PyTree


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
  """

  value: PyTree
  dimensions: tuple[int | None, ...] = dataclasses.field(
    metadata={"static": True}
  )
  axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

  def specs(self) -> "Split":
    """Returns the partition spec of every leaf, in the same structure."""
    treedef: Any = jax.tree.structure(self)
    return treedef.unflatten(
      [
        PartitionSpec()
        if dimension is None
        else PartitionSpec(*[None] * dimension, self.axes)
        for dimension in self.dimensions
      ]
    )
