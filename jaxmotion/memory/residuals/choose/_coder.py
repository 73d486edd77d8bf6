"""Encoding and decoding of residuals, traced once for each type of array."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import _partition

# Random keys are made from about so many elements of an array.
_SAMPLED_ELEMENTS = 2048

Buffers = list[Array]
"""The encoded buffers of one residual: what is saved of it."""


@functools.lru_cache(maxsize=4096)
def make_coder(
  codec: codecs.Codec | None,
  kind: str,
  shape: tuple[int, ...],
  dtype: Any,
  partition: _partition.Partition | None,
) -> Coder:
  """Returns the coder of a type of arrays, always the same one."""
  return Coder(codec, kind, jax.ShapeDtypeStruct(shape, dtype), partition)


class Coder:
  """Encodes and decodes arrays of one type.

  A network has many residuals of few types, and a codec is tens of operations.
  So each direction is a jitted function, which JAX traces once for a type.

  Args:
    codec: codec of floats; None keeps their bits, and packs masks.
    kind: kind of the array; see `Residual`.
    like: shape and dtype of the array.
    partition: how it lies on a mesh; None if one device holds it.

  Attributes:
    likes: types of the buffers.
    nbytes: bytes of all buffers.
    encode: function from an array to its buffers.
    decode: function from the buffers to the array, up to rounding.
  """

  def __init__(
    self,
    codec: codecs.Codec | None,
    kind: str,
    like: jax.ShapeDtypeStruct,
    partition: _partition.Partition | None,
  ):
    self._codec, self._kind, self._like = codec, kind, like
    if codec is None and kind != "mask":
      partition = None  # Each element is encoded by itself.
    self._partition = partition
    if partition is not None:
      self._like = like.update(shape=partition.part_shape, sharding=None)
    # Floats that no codec encodes are saved as unsigned words too: XLA:CPU
    # would keep a narrow float as float32, and nothing rounds a word.
    is_encoded = kind in ("mask", "dense", "sparse") and math.prod(like.shape)
    if not is_encoded:
      self.likes, self._tree = jax.tree.flatten(like)
      self.encode: Any = lambda x: [x]
      self.decode: Any = lambda buffers: buffers[0]
    else:
      self._payload, self._tree = jax.tree.flatten(
        codec.payload_like(self._like)
        if codec is not None
        else trace.packed_like(self._like.shape, 1)
        if kind == "mask"
        else self._like
      )
      self.likes = [a.update(dtype=_word_dtype(a.dtype)) for a in self._payload]
      if partition is not None:
        self.likes = [partition.stack_like(a) for a in self.likes]
      self.encode = jax.jit(self._encode)
      self.decode = jax.jit(self._decode)
    self.nbytes = sum(
      math.prod(a.shape) * int(getattr(a.dtype, "itemsize", 8))
      for a in self.likes
    )

  def overflow_count(self, buffers: Buffers) -> Array:
    """Returns the number of nonzeros that had no room, from the buffers."""
    counts = jax.tree.unflatten(self._tree, buffers).overflow
    return counts if self._partition is None else jnp.sum(counts)

  def _encode(self, x: Array) -> Buffers:
    if self._partition is None:
      return self._encode_part(x)
    return self._partition.encode_parts(self._encode_part, x)

  def _decode(self, buffers: Buffers) -> Array:
    if self._partition is None:
      return self._decode_part(buffers)
    return self._partition.decode_parts(self._decode_part, buffers)

  def _encode_part(self, x: Array) -> Buffers:
    if self._kind != "mask":
      x = differentiate_once(x)
    return [_float_bits(a) for a in jax.tree.leaves(self._make_payload(x))]

  def _decode_part(self, buffers: Buffers) -> Array:
    payload = jax.tree.unflatten(
      self._tree,
      [
        b if b.dtype == a.dtype else core.from_bits(b, a.dtype)
        for b, a in zip(buffers, self._payload, strict=True)
      ],
    )
    if self._codec is not None:
      return self._codec.decode(payload, self._like)
    if self._kind == "mask":
      return trace.unpack_codes(payload, 1, self._like.shape).astype(jnp.bool_)
    return payload

  def _make_payload(self, x: Array) -> PyTree:
    if self._codec is not None:
      key = _key_from_data(x) if self._codec.needs_key else None
      return self._codec.encode(x, self._codec.init(x), key)[0]
    if self._kind == "mask":
      return trace.pack_codes(x, 1)
    return x


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
