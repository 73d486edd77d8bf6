"""Encodes and decodes residuals, each part of an array where it is.

A codec takes blocks of the flat array, and a block that lies on two devices
would be moved. So an array on a mesh is encoded part by part, and no part
lies on two devices:

* Axes of kind `Explicit` are in the array's type. Each device encodes its own
  shard, in a `shard_map`.
* Axes of kind `Auto` are not: the compiler decides what they partition. Each
  dimension is cut into as many parts as these axes have devices, so every
  partition of a dimension that the compiler may choose has whole parts.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmotion import codecs, core
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals import trace

# Random keys are made from about so many elements of an array.
_SAMPLED_ELEMENTS = 2048
# Parts are not smaller, since each has scales of its own. Small arrays may have
# small parts: few bytes of scales cost less than to move the array.
_LEAST_ELEMENTS = 1024
_LEAST_OF_SMALL = 16
_SMALL_ARRAY = 1 << 20

Buffers = list[Array]
"""The encoded buffers of one residual: what is saved of it."""


class Coder:
  """Encodes and decodes arrays of one type."""

  # A network has many residuals of few types, and a codec is tens of
  # operations. So each direction is a jitted function, which JAX traces once
  # for a type.
  likes: list[jax.ShapeDtypeStruct]  # Types of the buffers.
  nbytes: int  # Of all buffers.
  encode: Any  # Function from an array to its buffers.
  decode: Any  # Its inverse, up to rounding.
  _tree: Any  # Structure of the payload.

  def __init__(
    self,
    codec: codecs.Codec | None,
    kind: str,
    like: jax.ShapeDtypeStruct,
    partition: "Partition | None",
  ):
    self._codec, self._kind, self._like = codec, kind, like
    if codec is None and kind != "mask":
      partition = None  # Each element is encoded by itself.
    self._partition = partition
    if partition is not None:
      pairs = zip(partition.shard, partition.grid, strict=True)
      part = tuple(n // count for n, count in pairs)
      self._like = like.update(shape=part, sharding=None)
    # Floats that no codec encodes are saved as unsigned words too: XLA:CPU
    # would keep a narrow float as float32, and nothing rounds a word.
    is_encoded = kind in ("mask", "dense", "sparse") and math.prod(like.shape)
    if not is_encoded:
      self.likes, self._tree = jax.tree.flatten(like)
      self.encode = lambda x: [x]
      self.decode = lambda buffers: buffers[0]
    else:
      self._payload, self._tree = jax.tree.flatten(
        codec.payload_like(self._like)
        if codec is not None
        else trace.packed_like(self._like.shape, 1)
        if kind == "mask"
        else self._like
      )
      self.likes = [a.update(dtype=_word_dtype(a.dtype)) for a in self._payload]
      encode: Any = self._encode
      decode: Any = self._decode
      if partition is not None:
        self.likes = [partition.stack_like(a) for a in self.likes]
        encode = functools.partial(partition.encode_parts, encode)
        decode = functools.partial(partition.decode_parts, decode)
      self.encode, self.decode = jax.jit(encode), jax.jit(decode)
    self.nbytes = sum(
      math.prod(a.shape) * int(getattr(a.dtype, "itemsize", 8))
      for a in self.likes
    )

  def overflow_count(self, buffers: Buffers) -> Array:
    """Returns the number of nonzeros that had no room, from the buffers."""
    counts = self._tree.unflatten(buffers).overflow
    return counts if self._partition is None else jnp.sum(counts)

  def _encode(self, x: Array) -> Buffers:
    """Returns the words of one part of an array."""
    payload: PyTree
    if self._kind == "mask":
      payload = trace.pack_codes(x, 1)
    else:
      payload = x = differentiate_once(x)
    if self._codec is not None:
      key = _key_from_data(x) if self._codec.needs_key else None
      payload, _ = self._codec.encode(x, self._codec.init(x), key)
    return [_float_bits(a) for a in jax.tree.leaves(payload)]

  def _decode(self, buffers: Buffers) -> Array:
    """Returns one part of an array, from its words."""
    pairs = zip(buffers, self._payload, strict=True)
    payload = self._tree.unflatten(
      b if b.dtype == a.dtype else core.from_bits(b, a.dtype) for b, a in pairs
    )
    if self._codec is not None:
      return self._codec.decode(payload, self._like)
    if self._kind == "mask":
      return trace.unpack_codes(payload, 1, self._like.shape).astype(jnp.bool_)
    return payload


# The same coder for all arrays of a type, so that JAX traces its codec once.
make_coder = functools.lru_cache(maxsize=4096)(Coder)


@jax.custom_jvp
def differentiate_once(x: Array) -> Array:
  """Returns `x` and refuses to be differentiated once more."""
  # The encoded buffers are bits, which have no derivative: without this, second
  # derivatives would silently be zero.
  return x


@differentiate_once.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
  raise NotImplementedError(
    "A function wrapped in `compress_residuals` has no second derivatives: its "
    "saved residuals are bits. Wrap a function that is differentiated once."
  )


def _key_from_data(x: Array) -> core.Key:
  """Returns a random key made from some of the array's own bits."""
  # Rounding is then reproducible, and differs between steps and layers without
  # a counter that the caller would have to pass.
  words = _float_bits(_sample(x)).astype(jnp.uint32)
  # A sum, since a compiler that partitions the array cannot reduce by `xor`
  # over the devices.
  return core.make_key(jnp.sum(words, dtype=jnp.uint32))


def _sample(x: Array) -> Array:
  """Returns about 2048 elements or more, spread over the array."""
  # The first axis is thinned out only if it is the only one. It is the one that
  # is most often partitioned, and a part of each device's rows is local.
  to_drop = x.size // _SAMPLED_ELEMENTS
  steps = [1] * x.ndim
  for axis in reversed(range(min(1, x.ndim - 1), x.ndim)):
    steps[axis] = max(1, min(to_drop, x.shape[axis]))
    to_drop //= steps[axis]
  return x[tuple(slice(None, None, step) for step in steps)]


def _float_bits(x: Array) -> Array:
  """Returns a float's bits as words; others, and float64, as they are."""
  return x if _word_dtype(x.dtype) == x.dtype else core.to_bits(x)


def _word_dtype(dtype: Any) -> Any:
  """Returns the dtype of the words in which arrays of a dtype are saved."""
  is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4
  return core.word_dtype(dtype) if is_narrow else dtype


class Partition(NamedTuple):
  """The parts of an array on a mesh."""

  mesh: Any  # Abstract.
  spec: PartitionSpec  # Axes of kind `Explicit` of each dimension.
  shard: tuple[int, ...]  # Shape of what one device of these axes holds.
  grid: tuple[int, ...]  # Parts along each dimension of a shard.

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
      parts = x.reshape(_cut_shape(self.shard, self.grid))
      mapped = encode
      for axis in self._cut_axes():
        mapped = jax.vmap(mapped, in_axes=axis)
      buffers = mapped(parts)
      return [b[None] for b in buffers] if self.shard_axes else buffers

    stacked = PartitionSpec(self.shard_axes)
    return self._on_shards(encode_shard, self.spec, stacked)(x)

  def decode_parts(
    self, decode: Callable[[list[Array]], Array], buffers: Sequence[Array]
  ) -> Array:
    """Decodes each part of an array; inverts `encode_parts`."""

    def decode_shard(buffers: list[Array]) -> Array:
      if self.shard_axes:
        buffers = [b[0] for b in buffers]
      mapped = decode
      for axis in self._cut_axes():
        mapped = jax.vmap(mapped, out_axes=axis)
      return mapped(buffers).reshape(self.shard)

    stacked = PartitionSpec(self.shard_axes)
    return self._on_shards(decode_shard, stacked, self.spec)(list(buffers))

  def _cut_axes(self) -> list[int]:
    """Returns the dimensions of several parts, the last one first."""
    # `vmap` of dimension i sees the axis of its parts at i: the axes of earlier
    # dimensions are mapped by further `vmap`s around it.
    return [i for i, count in enumerate(self.grid) if count > 1][::-1]

  def _on_shards(
    self, fn: Callable[..., Any], in_specs: Any, out_specs: Any
  ) -> Callable[..., Any]:
    """Returns a function that each device runs on its own shard."""
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
  """Returns the parts of an array on a mesh, None if it is one part."""
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

  >>> _choose_grid((8, 128, 6), 4), _choose_grid((8, 64), 1)
  ((4, 4, 2), (1, 1))
  """
  # Batches and features are cut first: they are what is partitioned most often.
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


def _cut_shape(shape: Sequence[int], grid: Sequence[int]) -> list[int]:
  """Returns a shape with an axis of parts before each dimension that is cut.

  >>> _cut_shape((8, 6), (1, 2))
  [8, 2, 3]
  """
  cut_shape: list[int] = []
  for n, count in zip(shape, grid, strict=True):
    cut_shape += (count, n // count) if count > 1 else (n,)
  return cut_shape


def _axes_of_kind(mesh: Any, kind: AxisType) -> list[str]:
  """Returns the names of a mesh's axes of one kind."""
  pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return [name for name, own_kind in pairs if own_kind == kind]
