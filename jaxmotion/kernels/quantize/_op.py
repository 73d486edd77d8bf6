"""The uniform quantizers as block ops."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import (
  Array,
  Key,
  ShapedLike,
  check_bool,
  check_int,
  random_words_at,
)
from jaxmotion.kernels._block_layout import block_shape
from jaxmotion.kernels._block_op import (
  BlockLayout,
  BlockOp,
  LeafLayout,
  Tile,
  fill_outside,
  layout_blocks,
  tile_peak,
)
from jaxmotion.kernels._checks import check_block
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
  """Base of quantizers with evenly spaced levels.

  Attributes:
    bits: width of a code, 1 to 8.
    block: maximum number of elements under one scale.
    stochastic: whether rounding is random.
  """

  bits: int
  block: int
  stochastic: bool = False

  def __post_init__(self) -> None:
    check_int("bits", self.bits, 1, 8)
    check_block(self.block)
    check_bool("stochastic", self.stochastic)

  @property
  def planes(self) -> int:
    """Number of planes: the codes of a word."""
    return num_planes(self.bits)

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.stochastic

  def layout(self, shape: tuple[int, ...]) -> BlockLayout:
    """Returns blocks with one scale each."""
    return layout_blocks(shape, self.planes, self.block)

  def decoded_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the planes, the blocks of a plane and their width."""
    return block_shape(shape, self.planes, self.block)

  def _random_words(self, seed: Array | None, tile: Tile) -> Array | None:
    return None if seed is None else random_words_at(seed, tile.position)

  def _word_leaf(self) -> LeafLayout:
    return LeafLayout(tuple(piece_rows(self.bits)), True)

  def _scale_leaf(self) -> LeafLayout:
    return LeafLayout(((0, self.planes),), False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsmaxOp(UniformOp):
  """Levels around zero, up to the greatest magnitude of the block."""

  def encode(self, x: Array, key: Key | None) -> Symmetric:
    """Returns codes and one scale per block."""
    return absmax_encode(x, self.bits, self.block, key)

  def decode(self, payload: Symmetric, like: ShapedLike) -> Array:
    """Returns the levels of the codes."""
    return absmax_decode(payload, like, self.bits)

  def leaf_layouts(self) -> tuple[LeafLayout, ...]:
    """Returns the layouts of words and scales."""
    return self._word_leaf(), self._scale_leaf()

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    scale = absmax_scale(tile_peak(x), self.bits)
    words = self._random_words(seed, tile)
    codes = absmax_codes(divide_tile(x, scale), self.bits, words)
    return _pack_pieces(codes, self.bits), [scale]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    return absmax_values(_unpack_pieces(words, self.bits), self.bits) * scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinMaxOp(UniformOp):
  """Levels from the minimum to the maximum of the block."""

  def encode(self, x: Array, key: Key | None) -> MinMax:
    """Returns codes, one scale and one minimum per block."""
    return minmax_encode(x, self.bits, self.block, key)

  def decode(self, payload: MinMax, like: ShapedLike) -> Array:
    """Returns the levels of the codes."""
    return minmax_decode(payload, like, self.bits)

  def leaf_layouts(self) -> tuple[LeafLayout, ...]:
    """Returns the layouts of words, scales and minima."""
    return self._word_leaf(), self._scale_leaf(), self._scale_leaf()

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    least = jnp.min(fill_outside(x, tile, jnp.inf), axis=2, keepdims=True)
    greatest = jnp.max(fill_outside(x, tile, -jnp.inf), axis=2, keepdims=True)
    # On a GPU the minimum and maximum of floats drop NaN.
    nan = jnp.isnan(tile_peak(x))
    least = jnp.where(nan, jnp.nan, least)
    low, scale = minmax_scale(
      least, jnp.where(nan, jnp.nan, greatest), self.bits
    )
    y = divide_tile(0.5 * x - low, scale)
    codes = minmax_codes(y, self.bits, self._random_words(seed, tile))
    return _pack_pieces(codes, self.bits), [scale], [2 * low]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,), (low,) = leaves
    return minmax_values(_unpack_pieces(words, self.bits), scale, low)


def divide_tile(y: Array, scale: Array) -> Array:
  """Returns y / scale with the bits of the reference.

  A kernel's floating-point division is off by a bit, which would change codes.
  The reciprocal of the 16-bit scale is computed in integers instead.
  """
  power, short = normalize(scale)
  inverse = jnp.where(power > 0, _reciprocal(short), 0.0)
  return (y * power) * inverse


def _reciprocal(short: Array) -> Array:
  """Returns 1 / short, correctly rounded, of 16 significant bits in [2, 4).

  With m = short 2^14, 1 / short is 2^39 / m up to a power of two. Two steps of
  a long division give its 24 bits, and the remainder rounds the last one.
  """
  bits = lax.bitcast_convert_type(short, jnp.uint32)
  m = ((bits >> 8) & jnp.uint32(0x7FFF)) | jnp.uint32(0x8000)
  # The last bit of 2^39 / m is that of a float of this size, and no quotient
  # lies half-way between two.
  high = jnp.uint32(2**31) // m
  rest = (jnp.uint32(2**31) - high * m) << 8
  low = rest // m
  up = (2 * (rest - low * m) >= m).astype(jnp.uint32)
  quotient = (high << 8) + low + up
  return quotient.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-25)


def _pack_pieces(codes: Array, bits: int) -> list[Array]:
  return [piece for _, piece in pack_tile(codes, bits)]


def _unpack_pieces(words: list[Array], bits: int) -> Array:
  return unpack_tile(words, bits).astype(jnp.int32).astype(jnp.float32)
