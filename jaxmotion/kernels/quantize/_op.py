"""The quantisers of `_reference` as passes over blocks."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, ShapedLike, random_words_at
from jaxmotion.kernels._block_op import (
  BlockOp,
  Cut,
  Leaf,
  Tile,
  cut_blocks,
  fill,
  peak_tile,
)
from jaxmotion.kernels.pack import (
  num_planes,
  pack_tile,
  piece_rows,
  unpack_tile,
)
from jaxmotion.kernels.quantize._reference import (
  MinMax,
  Symmetric,
  absmax_codes,
  absmax_decode,
  absmax_encode,
  absmax_scale,
  absmax_values,
  minmax_codes,
  minmax_decode,
  minmax_encode,
  minmax_scale,
  minmax_values,
  normalize,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformOp(BlockOp):
  """Evenly spaced levels.

  Attributes:
    bits: 1 to 8.
    block: the most values under one scale.
    stochastic: rounding.
  """

  bits: int
  block: int
  stochastic: bool = False

  @property
  def planes(self) -> int:
    """Codes of one word."""
    return num_planes(self.bits)

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.stochastic

  def cut(self, shape: tuple[int, ...]) -> Cut:
    """Blocks with a scale each."""
    return cut_blocks(shape, self.planes, self.block)

  def _words(self, seed: Array | None, tile: Tile) -> Array | None:
    return None if seed is None else random_words_at(seed, tile.position)

  def _word_leaf(self) -> Leaf:
    return Leaf(tuple(piece_rows(self.bits)), True)

  def _scale_leaf(self) -> Leaf:
    return Leaf(((0, self.planes),), False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsmaxOp(UniformOp):
  """Levels around zero."""

  def encode(self, x: Array, key: Key | None) -> Symmetric:
    """Returns codes and a scale a block."""
    return absmax_encode(x, self.bits, self.block, key)

  def decode(self, payload: Symmetric, like: ShapedLike) -> Array:
    """Returns the levels."""
    return absmax_decode(payload, like, self.bits)

  def leaves(self) -> tuple[Leaf, ...]:
    """Words and scales."""
    return self._word_leaf(), self._scale_leaf()

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes a tile."""
    scale = absmax_scale(peak_tile(x), self.bits)
    words = self._words(seed, tile)
    codes = absmax_codes(divide_tile(x, scale), self.bits, words)
    return _pieces(codes, self.bits), [scale]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes a tile."""
    words, (scale,) = leaves
    return absmax_values(_values(words, self.bits), self.bits) * scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinMaxOp(UniformOp):
  """Levels from the least to the greatest value."""

  def encode(self, x: Array, key: Key | None) -> MinMax:
    """Returns codes, and a scale and a least value a block."""
    return minmax_encode(x, self.bits, self.block, key)

  def decode(self, payload: MinMax, like: ShapedLike) -> Array:
    """Returns the levels."""
    return minmax_decode(payload, like, self.bits)

  def leaves(self) -> tuple[Leaf, ...]:
    """Words, scales and least values."""
    return self._word_leaf(), self._scale_leaf(), self._scale_leaf()

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes a tile."""
    least = jnp.min(fill(x, tile, jnp.inf), axis=2, keepdims=True)
    greatest = jnp.max(fill(x, tile, -jnp.inf), axis=2, keepdims=True)
    # The greatest and least of floats need not be NaN on a GPU if one is.
    nan = jnp.isnan(peak_tile(x))
    least = jnp.where(nan, jnp.nan, least)
    low, scale = minmax_scale(
      least, jnp.where(nan, jnp.nan, greatest), self.bits
    )
    y = divide_tile(0.5 * x - low, scale)
    codes = minmax_codes(y, self.bits, self._words(seed, tile))
    return _pieces(codes, self.bits), [scale], [2 * low]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes a tile."""
    words, (scale,), (low,) = leaves
    return minmax_values(_values(words, self.bits), scale, low)


def divide_tile(y: Array, scale: Array) -> Array:
  """y / scale as the reference has it, though kernels divide less exactly."""
  power, short = normalize(scale)
  inverse = jnp.where(power > 0, _reciprocal(short), 0.0)
  return (y * power) * inverse


def _reciprocal(short: Array) -> Array:
  """1 / short, correctly rounded, of 16 significant bits in [2, 4)."""
  bits = lax.bitcast_convert_type(short, jnp.uint32)
  m = ((bits >> 8) & jnp.uint32(0x7FFF)) | jnp.uint32(0x8000)
  # 2^39 / m by two steps of a long division; its last bit is that of a float
  # of this size, and no quotient lies half-way between two.
  high = jnp.uint32(2**31) // m
  rest = (jnp.uint32(2**31) - high * m) << 8
  low = rest // m
  up = (2 * (rest - low * m) >= m).astype(jnp.uint32)
  quotient = (high << 8) + low + up
  return quotient.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-25)


def _pieces(codes: Array, bits: int) -> list[Array]:
  return [piece for _, piece in pack_tile(codes, bits)]


def _values(words: list[Array], bits: int) -> Array:
  return unpack_tile(words, bits).astype(jnp.int32).astype(jnp.float32)
