"""The uniform quantizers as block ops."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_op, _checks, pack
from jaxmotion.kernels.quantize import _reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformOp(_block_op.BlockOp):
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
    core.check_int("bits", self.bits, 1, 8)
    _checks.check_block(self.block)
    core.check_bool("stochastic", self.stochastic)

  @property
  def planes(self) -> int:
    """Number of planes: the codes of a word."""
    return pack.num_planes(self.bits)

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.stochastic

  def layout(self, shape: tuple[int, ...]) -> _block_op.BlockLayout:
    """Returns blocks with one scale each."""
    return _block_op.layout_blocks(shape, self.planes, self.block)

  def decoded_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the planes, the blocks of a plane and their width."""
    return _block_op.block_shape(shape, self.planes, self.block)

  def _random_words(
    self, seed: Array | None, tile: _block_op.Tile
  ) -> Array | None:
    return None if seed is None else core.random_words_at(seed, tile.position)

  def _word_leaf(self) -> _block_op.LeafLayout:
    return _block_op.LeafLayout(tuple(pack.piece_rows(self.bits)), True)

  def _scale_leaf(self) -> _block_op.LeafLayout:
    return _block_op.LeafLayout(((0, self.planes),), False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsmaxOp(UniformOp):
  """Levels around zero, up to the greatest magnitude of the block."""

  def encode(self, x: Array, key: core.Key | None) -> _reference.Symmetric:
    """Returns codes and one scale per block."""
    return _reference.absmax_encode(x, self.bits, self.block, key)

  def decode(self, payload: _reference.Symmetric, like: ShapedLike) -> Array:
    """Returns the levels of the codes."""
    return _reference.absmax_decode(payload, like, self.bits)

  def leaf_layouts(self) -> tuple[_block_op.LeafLayout, ...]:
    """Returns the layouts of words and scales."""
    return self._word_leaf(), self._scale_leaf()

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    scale = _reference.absmax_scale(_block_op.tile_peak(x), self.bits)
    words = self._random_words(seed, tile)
    codes = _reference.absmax_codes(divide_tile(x, scale), self.bits, words)
    return _pack_pieces(codes, self.bits), [scale]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    return (
      _reference.absmax_values(_unpack_pieces(words, self.bits), self.bits)
      * scale
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinMaxOp(UniformOp):
  """Levels from the minimum to the maximum of the block."""

  def encode(self, x: Array, key: core.Key | None) -> _reference.MinMax:
    """Returns codes, one scale and one minimum per block."""
    return _reference.minmax_encode(x, self.bits, self.block, key)

  def decode(self, payload: _reference.MinMax, like: ShapedLike) -> Array:
    """Returns the levels of the codes."""
    return _reference.minmax_decode(payload, like, self.bits)

  def leaf_layouts(self) -> tuple[_block_op.LeafLayout, ...]:
    """Returns the layouts of words, scales and minima."""
    return self._word_leaf(), self._scale_leaf(), self._scale_leaf()

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    least = jnp.min(
      _block_op.fill_outside(x, tile, jnp.inf), axis=2, keepdims=True
    )
    greatest = jnp.max(
      _block_op.fill_outside(x, tile, -jnp.inf), axis=2, keepdims=True
    )
    # On a GPU the minimum and maximum of floats drop NaN.
    nan = jnp.isnan(_block_op.tile_peak(x))
    least = jnp.where(nan, jnp.nan, least)
    low, scale = _reference.minmax_scale(
      least, jnp.where(nan, jnp.nan, greatest), self.bits
    )
    y = divide_tile(0.5 * x - low, scale)
    codes = _reference.minmax_codes(
      y, self.bits, self._random_words(seed, tile)
    )
    return _pack_pieces(codes, self.bits), [scale], [2 * low]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,), (low,) = leaves
    return _reference.minmax_values(
      _unpack_pieces(words, self.bits), scale, low
    )


def divide_tile(y: Array, scale: Array) -> Array:
  """Returns y / scale with the bits of the reference."""
  # A kernel's floating-point division is off by a bit, which would change
  # codes. The reciprocal of the 16-bit scale is computed in integers instead.
  power, short = _reference.normalize(scale)
  inverse = jnp.where(power > 0, _reciprocal(short), 0.0)
  return (y * power) * inverse


def _reciprocal(short: Array) -> Array:
  """Returns 1 / short, correctly rounded, of 16 significant bits in [2, 4)."""
  # With m = short 2^14, 1 / short is 2^39 / m up to a power of two. Two steps
  # of a long division give its 24 bits, and the remainder rounds the last one.
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
  return [piece for _, piece in pack.pack_tile(codes, bits)]


def _unpack_pieces(words: list[Array], bits: int) -> Array:
  return pack.unpack_tile(words, bits).astype(jnp.int32).astype(jnp.float32)
