"""Rows of a state whose other workers are lost.

Processes that died keep their rows. Arrays on the old mesh are then read row by
row, by the process that has the row, and no collective needs the dead.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxmotion import core, transforms
from jaxmotion.checkpoint import _layout
from jaxmotion.core import PyTree
from jaxmotion.transforms import extend


def find_own(saved: PyTree, specs: PyTree, names: Collection[str]) -> PyTree:
  """Returns which arrays have a row for each worker, a tree of booleans."""

  def is_own(spec: jax.P, _: Any) -> bool:
    return bool(spec) and not set(names).isdisjoint(core.spec_axes(spec[0]))

  return jax.tree.map(is_own, jax.tree.broadcast(specs, saved), saved)


def find_living(
  state: PyTree,
  own: PyTree,
  layout: _layout.Layout,
  mesh: Mesh | AbstractMesh,
  lost: Collection[int],
) -> list[int]:
  """Returns the workers of a layout that live, in the order of new workers."""
  (_, count), *others = layout.workers
  living = [i for i in range(count) if i not in lost]
  if not (living and set(lost) <= set(range(count))):
    raise ValueError(
      f"`lost` must have some of the {count} workers of `layout`, got {lost}."
    )
  if (
    others
    or layout.model
    or isinstance(state, transforms.FullyShardedState)
    or any(isinstance(x, extend.ShardedOptions) for x in layout.exchanges)
  ):
    raise ValueError(
      "`lost` must be empty for a state of which each worker holds a part, as "
      f"of `sharded`, a model's axes or `HostAxes`, got {lost}: restore a "
      "checkpoint."
    )
  rows = [
    leaf
    for leaf, is_own in zip(
      jax.tree.leaves(state), jax.tree.leaves(own), strict=True
    )
    if is_own and not core.is_local(leaf)
  ]
  if not rows:
    return living
  # Devices keep their rows, wherever they stand on the new mesh.
  places = rows[0].sharding.devices_indices_map(rows[0].shape)
  row_of = {d: index[0].start or 0 for d, index in places.items()}
  devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
  found = [row_of.get(d, -1) for d in devices]
  if sorted(found) != living:
    raise ValueError(
      "`mesh` must have the devices of the workers that live, and no others, "
      f"while `state` is on the old mesh, got {devices}: resize again to add "
      "workers."
    )
  return found


def keep_shapes(saved: PyTree, own: PyTree, count: int) -> PyTree:
  """Returns the shapes of a state with rows of so many workers."""
  return jax.tree.map(
    lambda x, is_own: (
      jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) if is_own else x
    ),
    saved,
    own,
  )


def take_rows(
  state: PyTree, own: PyTree, living: Sequence[int], likes: PyTree
) -> PyTree:
  """Returns a state with the rows of the living, placed like `likes`."""

  def take(x: Any, is_own: bool, like: jax.ShapeDtypeStruct) -> Any:
    if core.is_local(x):
      x = x[np.asarray(living)] if is_own else x
      return x if like.sharding is None else jax.device_put(x, like.sharding)
    shards = {
      (s.index[0].start or 0) if is_own else -1: s.data
      for s in x.addressable_shards
    }

    def read(index: Any) -> Any:
      return (
        shards[living[index[0].start or 0]] if is_own else shards[-1][index]
      )

    return jax.make_array_from_callback(like.shape, like.sharding, read)

  return jax.tree.map(take, state, own, likes)
