"""Cuts arrays into parts, so that a mesh encodes each part where it is.

A codec takes blocks of the flat array, and a block that lies on two devices
would be moved. So an array on a mesh is encoded part by part, and no part
lies on two devices:

* Axes of kind `Explicit` are in the array's type. Each device encodes its own
  shard, in a `shard_map`.
* Axes of kind `Auto` are not: the compiler decides what they partition. Each
  dimension is cut into as many parts as these axes have devices, so every
  partition of a dimension that the compiler may choose has whole parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmotion import core
from jaxmotion.core import Array

# Parts are not smaller, since each has scales of its own. Small arrays may have
# small parts: few bytes of scales cost less than to move the array.
_LEAST_ELEMENTS = 1024
_LEAST_OF_SMALL = 16
_SMALL_ARRAY = 1 << 20


class Partition(NamedTuple):
  """Describes the parts of an array on a mesh.

  Attributes:
    mesh: the mesh, abstract.
    spec: axes of kind `Explicit` that partition each dimension.
    shard: shape of what one device of these axes holds.
    grid: parts along each dimension of a shard.
  """

  mesh: Any
  spec: PartitionSpec
  shard: tuple[int, ...]
  grid: tuple[int, ...]

  @property
  def part_shape(self) -> tuple[int, ...]:
    """The shape of one part."""
    pairs = zip(self.shard, self.grid, strict=True)
    return tuple(n // count for n, count in pairs)

  @property
  def shard_axes(self) -> tuple[str, ...]:
    """The axes of `spec`, in order."""
    return tuple(a for entry in self.spec for a in core.spec_axes(entry))

  def stack_like(self, part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the type of one buffer of all parts."""
    cuts = tuple(count for count in self.grid if count > 1)
    shape = (*cuts, *part.shape)
    if not self.shard_axes:
      return jax.ShapeDtypeStruct(shape, part.dtype)
    sizes = dict(self.mesh.shape)
    shards = math.prod(sizes[a] for a in self.shard_axes)
    sharding = NamedSharding(self.mesh, PartitionSpec(self.shard_axes))
    return jax.ShapeDtypeStruct((shards, *shape), part.dtype, sharding=sharding)

  def encode_parts(
    self, encode: Callable[[Array], list[Array]], x: Array
  ) -> list[Array]:
    """Encodes each part of an array; returns the stacked buffers."""

    def encode_shard(x: Array) -> list[Array]:
      buffers = self._map_parts(encode)(_split_parts(x, self.grid))
      return [b[None] for b in buffers] if self.shard_axes else buffers

    return self._on_shards(encode_shard, self.spec, self._stack_spec)(x)

  def decode_parts(
    self, decode: Callable[[list[Array]], Array], buffers: Sequence[Array]
  ) -> Array:
    """Decodes each part of an array; inverts `encode_parts`."""

    def decode_shard(buffers: list[Array]) -> Array:
      if self.shard_axes:
        buffers = [b[0] for b in buffers]
      parts = self._map_parts(decode)(buffers)
      return _join_parts(parts, self.grid)

    on_shards = self._on_shards(decode_shard, self._stack_spec, self.spec)
    return on_shards(list(buffers))

  @property
  def _stack_spec(self) -> PartitionSpec:
    return PartitionSpec(self.shard_axes)

  def _map_parts(self, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    for count in self.grid:
      fn = jax.vmap(fn) if count > 1 else fn
    return fn

  def _on_shards(
    self, fn: Callable[..., Any], in_specs: Any, out_specs: Any
  ) -> Callable[..., Any]:
    if not self.shard_axes:
      return fn
    return jax.shard_map(
      fn,
      mesh=self.mesh,
      in_specs=(in_specs,),
      out_specs=out_specs,
      axis_names=set(_axes_of_kind(self.mesh, AxisType.Explicit)),
    )


def find_partition(aval: Any) -> Partition | None:
  """Returns how an array lies on a mesh; None if one device holds all of it."""
  sharding = getattr(aval, "sharding", None)
  if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
    return None
  return _make_partition(sharding, tuple(aval.shape))


@functools.lru_cache(maxsize=4096)
def _make_partition(
  sharding: NamedSharding, shape: tuple[int, ...]
) -> Partition | None:
  mesh = sharding.mesh
  sizes = dict(mesh.shape)
  explicit = set(_axes_of_kind(mesh, AxisType.Explicit))
  entries = [
    tuple(a for a in core.spec_axes(entry) if a in explicit and sizes[a] > 1)
    for entry in (*sharding.spec, *[None] * len(shape))[: len(shape)]
  ]
  shard = tuple(
    n // math.prod(sizes[a] for a in axes)
    for n, axes in zip(shape, entries, strict=True)
  )
  devices = math.prod(sizes[a] for a in _axes_of_kind(mesh, AxisType.Auto))
  spec = PartitionSpec(*(axes or None for axes in entries))
  partition = Partition(mesh, spec, shard, _choose_grid(shard, devices))
  is_whole = not partition.shard_axes and math.prod(partition.grid) == 1
  return None if is_whole else partition


def _choose_grid(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
  """Returns the number of parts along each dimension.

  Batches and features are cut first: they are what is partitioned most often.

  >>> _choose_grid((8, 128, 6), 4), _choose_grid((8, 64), 1)
  ((4, 4, 2), (1, 1))
  """
  grid = [1] * len(shape)
  left = math.prod(shape)
  least = _LEAST_OF_SMALL if left < _SMALL_ARRAY else _LEAST_ELEMENTS
  order = range(len(shape))
  for axis in sorted(order, key=lambda i: (0 < i < len(shape) - 1, i)):
    count = math.gcd(shape[axis], devices)
    while count > 1 and left // count < least:
      count = next(n for n in range(count - 1, 0, -1) if count % n == 0)
    grid[axis] = count
    left //= count
  return tuple(grid)


def _split_parts(x: Array, grid: Sequence[int]) -> Array:
  """Moves the parts of each dimension to leading axes.

  >>> _split_parts(jnp.arange(4), (2,)).tolist()
  [[0, 1], [2, 3]]
  """
  shape, cuts = _cut_shape(x.shape, grid)
  rest = [i for i in range(len(shape)) if i not in cuts]
  return x.reshape(shape).transpose([*cuts, *rest])


def _join_parts(parts: Array, grid: Sequence[int]) -> Array:
  """Moves the parts back, the inverse of `_split_parts`."""
  count = sum(n > 1 for n in grid)
  part = parts.shape[count:]
  whole = tuple(n * g for n, g in zip(part, grid, strict=True))
  shape, cuts = _cut_shape(whole, grid)
  rest = [i for i in range(len(shape)) if i not in cuts]
  order = [*cuts, *rest]
  back = [order.index(i) for i in range(len(shape))]
  return parts.transpose(back).reshape(whole)


def _cut_shape(
  shape: Sequence[int], grid: Sequence[int]
) -> tuple[list[int], list[int]]:
  """Returns a shape with an axis of parts before each dimension that is cut.

  >>> _cut_shape((8, 6), (1, 2))
  ([8, 2, 3], [1])
  """
  found: list[int] = []
  cuts: list[int] = []
  for n, count in zip(shape, grid, strict=True):
    if count > 1:
      cuts.append(len(found))
      found.append(count)
    found.append(n // count)
  return found, cuts


def _axes_of_kind(mesh: Any, kind: AxisType) -> list[str]:
  pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return [name for name, found in pairs if found == kind]
