"""One residual: what it is and what it is kept as."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs import Codec, identity, zero_value
from jaxmotion.core import Array, Key, PyTree, make_key, shape_string
from jaxmotion.memory.residuals.choose._actions import (
  ResidualChoice,
  offload,
  recompute,
)
from jaxmotion.memory.residuals.trace import pack, unpack

# Arrays of fewer values are kept as they are: statistics, scales, scalars.
SMALL = 2048
_TILE = 1024
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class Residual(NamedTuple):
  """An array that a backward pass needs.

  Attributes:
    name: "kind/label"; see `residuals_of`.
    kind: "mask", "integer", "sparse", "dense" or "other".
    shape: of the array.
    dtype: of the array.
    codec: what it is encoded by; None keeps it as it is, a mask as bits.
    on_host: whether it is kept on the host.
    recomputed: whether it is recomputed instead of saved.
    repeats: how many there are, one for each step of a loop.
  """

  name: str
  kind: str
  shape: tuple[int, ...]
  dtype: Any
  codec: Codec | None = None
  on_host: bool = False
  recomputed: bool = False
  repeats: int = 1

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype."""
    return jax.ShapeDtypeStruct(self.shape, self.dtype)

  @property
  def is_float(self) -> bool:
    """Whether a codec can encode it."""
    return self.kind in ("dense", "sparse")

  @property
  def is_of_loop(self) -> bool:
    """Whether it is what a loop inside kept, or carried, as words."""
    return re.match(r"(integer|mask)/.*scan_", self.name) is not None

  @property
  def nbytes(self) -> int:
    """Bytes of the array."""
    return math.prod(self.shape) * _itemsize(self.dtype)

  @property
  def encoded_bytes(self) -> int:
    """Bytes of what is kept of it."""
    if not self._is_words():
      return self.nbytes
    kept = jax.tree.leaves(self._payload())
    return sum(a.size * a.dtype.itemsize for a in kept)

  @property
  def may_overflow(self) -> bool:
    """Whether some arrays are not all kept."""
    return isinstance(self.codec, zero_value) and self.codec.capacity < 1

  @property
  def rounds(self) -> bool:
    """Whether what is decoded may differ from what was encoded."""
    return not (
      self.codec is None or isinstance(self.codec, (identity, zero_value))
    )

  @property
  def is_exact(self) -> bool:
    """Whether what is decoded is always what was encoded."""
    return not (self.rounds or self.may_overflow)

  def encode(self, x: Array) -> tuple[list[Array], Array | None]:
    """Returns the words that are kept, and how many values are not."""
    if not self._is_words():
      return [x], None
    payload = self._encode(_once_differentiable(x) if self.is_float else x)
    dropped = payload.overflow if self.may_overflow else None
    return [_bits(a) for a in jax.tree.leaves(payload)], dropped

  def buffers_like(self) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of what is kept."""
    return jax.eval_shape(lambda x: self.encode(x)[0], self.like)

  def decode(self, words: list[Array]) -> Array:
    """Inverts `encode`."""
    if not self._is_words():
      return words[0]
    likes, tree = jax.tree.flatten(self._payload())
    payload = jax.tree.unflatten(
      tree, [_from_bits(w, a) for w, a in zip(words, likes, strict=True)]
    )
    if self.codec is not None:
      return self.codec.decode(payload, self.like)
    if self.kind == "mask":
      return unpack(payload, 1, self.shape).astype(jnp.bool_)
    return payload

  def dropped(self, words: list[Array]) -> Array:
    """Returns how many values are not kept, from what is."""
    tree = jax.tree.structure(self._payload())
    return jax.tree.unflatten(tree, words).overflow

  def _is_words(self) -> bool:
    """Whether what is kept is words of bits: nothing else rounds them."""
    if math.prod(self.shape) == 0:
      return False
    return self.kind in ("mask", "dense", "sparse")

  def _payload(self) -> PyTree:
    if self.codec is not None:
      return self.codec.payload_like(self.like)
    return jax.eval_shape(self._encode, self.like)

  def _encode(self, x: Array) -> PyTree:
    if self.codec is not None:
      return self.codec.encode(x, self.codec.init(x), _key_of(x))[0]
    if self.kind == "mask":
      return pack(x, 1)
    return x


def given(residual: Residual, choose: ResidualChoice) -> Residual:
  """Returns the residual with what was chosen for it.

  Raises:
    TypeError: the codec is not for such an array.
    ValueError: the codec remembers something between arrays.
  """
  if math.prod(residual.shape) < SMALL:
    return residual
  action = choose(residual)
  if isinstance(action, recompute):
    return residual._replace(recomputed=True)
  if isinstance(action, offload):
    residual, action = residual._replace(on_host=True), action.codec
  if action is None:
    return residual
  return _encoded(residual, action)


def _encoded(residual: Residual, codec: Codec) -> Residual:
  if not isinstance(codec, Codec):
    raise TypeError(
      "`codec` must give a Codec, `offload`, `recompute` or None for "
      f"{residual.name}, got {codec!r}."
    )
  if not residual.is_float:
    raise TypeError(
      f"`codec` must be None for {residual.name}, which is "
      f"{shape_string(residual.like)}, got {codec!r}."
    )
  if jax.tree.leaves(jax.eval_shape(codec.init, residual.like)):
    raise ValueError(
      "`codec` must remember nothing between arrays, got "
      f"{codec!r} for {residual.name}."
    )
  encoded = residual._replace(codec=codec)
  try:
    pays = encoded.encoded_bytes < residual.nbytes
  except TypeError as e:
    raise TypeError(
      f"`codec` must take {residual.name}, which is "
      f"{shape_string(residual.like)}, got {codec!r}: {e}"
    ) from e
  return encoded if pays else residual


@jax.custom_jvp
def _once_differentiable(x: Array) -> Array:
  """Returns `x`; its bits, which are what is kept, have no derivative."""
  return x


@_once_differentiable.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
  raise NotImplementedError(
    "A function wrapped in `compress_residuals` has no second derivatives: "
    "what it keeps for its backward pass is bits. Wrap it for what is "
    "differentiated once."
  )


def full(x: Array) -> Array:
  """The share of values of the fullest tile that are not zero, float32[]."""
  flat = (x != 0).reshape(-1)
  tile = min(_TILE, flat.size)
  rest = -flat.size % tile
  tiles = jnp.pad(flat, (0, rest)).reshape(-1, tile)
  counts = jnp.sum(tiles, axis=1, dtype=jnp.int32)
  return jnp.max(counts).astype(jnp.float32) / tile


def _key_of(x: Array) -> Key:
  """A key made of some of the array's own bits, so that steps differ."""
  flat = x.reshape(-1)
  some = _bits(flat[:: max(1, flat.size // SMALL)]).astype(jnp.uint32)
  return make_key(lax.reduce(some, jnp.uint32(0), lax.bitwise_xor, (0,)))


def _bits(x: Array) -> Array:
  """A float's bits: XLA:CPU would keep a narrow one as float32."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x
  word = _WORDS.get(x.dtype.itemsize)
  return x if word is None else lax.bitcast_convert_type(x, word)


def _from_bits(words: Array, like: jax.ShapeDtypeStruct) -> Array:
  if words.dtype == like.dtype:
    return words
  return lax.bitcast_convert_type(words, like.dtype)


def _itemsize(dtype: Any) -> int:
  return int(getattr(dtype, "itemsize", 8))
