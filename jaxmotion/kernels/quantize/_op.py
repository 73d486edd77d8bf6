"""The uniform quantizers as block ops.

Scale, rounding and packing are one expression, so that XLA makes one pass of
it. Three choices keep the bits of every backend equal. Scales have 16
significant bits, so that code * scale is exact and may be fused with a sum
(`_round_scale`). Rounding is in fixed point (`_round_to_codes`). Division is by
a normalized scale (`_normalize`).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_layout, _block_op, _checks
from jaxmotion.kernels.pack import _reference as packing

# A scale below this is too near the subnormals, which backends may flush to
# zero. Its block decodes to a constant instead.
_TINY = 2.0**-120
_MOST = float(np.finfo(np.float32).max)
# The exponent field of a float32.
_EXPONENT = np.uint32(0x7F800000)
# Mask of sign, exponent and the 16 significant bits of a scale.
_HIGH = 0xFFFFFF00
# Fraction bits of the fixed-point codes: codes up to 255 have room above them.
_POINT = 22


class Symmetric(NamedTuple):
  """Payload of packed codes around zero and their scales."""

  words: Array  # uint32[rows, blocks, width].
  # float32[planes, blocks], the step; [1, 1] for an array of one block.
  scale: Array


class MinMax(NamedTuple):
  """Payload of packed codes between the minimum and maximum of a block."""

  words: Array  # uint32[rows, blocks, width].
  # float32[planes, blocks], half the step (a whole one could overflow).
  scale: Array
  low: Array  # float32[planes, blocks], the value of code 0.


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  bits=core.integer(1, 8), block=_checks.check_block, stochastic=core.boolean
)
class UniformOp(_block_op.ScaledOp):
  """Base of quantizers with evenly spaced levels.

  Attributes:
    bits: width of a code, 1 to 8.
    block: maximum number of elements under one scale.
    stochastic: whether rounding is random.
  """

  bits: int
  block: int
  stochastic: bool = False

  @property
  def planes(self) -> int:
    """Number of planes: the codes of a word."""
    return packing.num_planes(self.bits)

  @property
  def word_rows(self) -> int:
    """Number of rows of words: the fields of a code take one and more."""
    return packing.word_rows(self.bits)

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.stochastic

  @abc.abstractmethod
  def _codes(self, y: Array, words: Array | None) -> Array:
    """Returns codes, uint32, of elements in steps; `words` are random."""

  def _pack_codes(
    self,
    x: Array,
    key: core.Key | None,
    measure: Callable[[Array, slice], Array],
  ) -> Array:
    """Returns words of the codes of an array, which `measure` puts in steps."""
    if key is None and len(packing.field_widths(self.bits)) == 1:
      parts = _block_layout.cut_planes(x, self.planes, self.block)
    else:
      b = _block_layout.to_blocks(x, self.planes, self.block)
      parts = [(slice(0, self.planes), b)]
    codes = []
    for planes, b in parts:
      y = measure(b, planes)
      drawn = None if key is None else core.random_words(key.worker, b.shape)
      codes.append((planes, self._codes(y, drawn)))
    return packing.pack_cut(codes, self.bits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsmaxOp(UniformOp):
  """2**bits - 1 levels around zero, up to the greatest magnitude of the block.

  One bit has two levels.
  """

  def encode(self, x: Array, key: core.Key | None) -> Symmetric:
    """Returns codes and one scale per block."""
    peak = _block_layout.reduce_blocks(
      x, self.planes, self.block, _block_layout.max_magnitude
    )
    scale = self._scale(peak)
    words = self._pack_codes(
      x, key, lambda b, planes: _divide(b, _scale_of(scale, planes))
    )
    return Symmetric(words, scale[..., 0])

  def decode(self, payload: Symmetric, like: ShapedLike) -> Array:
    """Returns the levels of the codes."""
    y = self._values(packing.unpack_to_float(payload.words, self.bits))
    y = y * lax.expand_dims(payload.scale, (2,))
    return _block_layout.from_blocks(y, like)

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    scale = self._scale(_block_op.tile_peak(x))
    words = _draw_tile_words(seed, tile)
    codes = self._codes(_divide_tile(x, scale), words)
    return packing.pack_tile(codes, self.bits), [scale]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    return self._values(packing.unpack_tile_to_float(words, self.bits)) * scale

  def _levels(self) -> tuple[int, float, float]:
    """Returns (highest code, code of zero, scales between two codes)."""
    if self.bits == 1:
      # Two scales apart: the step is twice the peak, which may be infinite.
      return 1, 0.5, 2.0
    steps = 2 ** (self.bits - 1) - 1
    return 2 * steps, float(steps), 1.0

  def _scale(self, peak: Array) -> Array:
    """Returns the steps, float32, of blocks with these greatest magnitudes."""
    _, middle, unit = self._levels()
    steps = unit * middle
    # By numpy, not `_clear_low_bits`: Pallas kernels take no operation whose
    # arguments are all constants.
    most = np.float32(np.float32(_MOST / steps) * (1 - 2.0**-16))
    short = (most.view(np.uint32) & np.uint32(_HIGH)).view(np.float32)
    return _round_scale(peak * jnp.float32(1 / steps), short)

  def _codes(self, y: Array, words: Array | None) -> Array:
    """Returns codes, uint32, of elements measured in steps."""
    top, middle, unit = self._levels()
    return _round_to_codes(y, unit, middle, top, words)

  def _values(self, codes: Array) -> Array:
    """Returns the values in steps, float32, of float32 codes."""
    _, middle, unit = self._levels()
    return (codes if unit == 1 else unit * codes) - unit * middle


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinMaxOp(UniformOp):
  """2**bits levels from the minimum to the maximum of the block."""

  scale_leaves: ClassVar[int] = 2

  def encode(self, x: Array, key: core.Key | None) -> MinMax:
    """Returns codes, one scale and one minimum per block."""
    least, greatest = (
      _block_layout.reduce_blocks(x, self.planes, self.block, reduce)
      for reduce in (_block_layout.min_element, _block_layout.max_element)
    )
    low, scale = self._low_and_scale(least, greatest)

    def measure(b: Array, planes: slice) -> Array:
      above = 0.5 * b - _scale_of(low, planes)
      return _divide(above, _scale_of(scale, planes))

    words = self._pack_codes(x, key, measure)
    return MinMax(words, scale[..., 0], 2 * low[..., 0])

  def decode(self, payload: MinMax, like: ShapedLike) -> Array:
    """Returns the levels of the codes."""
    codes = packing.unpack_to_float(payload.words, self.bits)
    y = _add_steps(codes, payload.scale[..., None], payload.low[..., None])
    return _block_layout.from_blocks(y, like)

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
    greatest = jnp.where(nan, jnp.nan, greatest)
    low, scale = self._low_and_scale(least, greatest)
    y = _divide_tile(0.5 * x - low, scale)
    codes = self._codes(y, _draw_tile_words(seed, tile))
    return packing.pack_tile(codes, self.bits), [scale], [2 * low]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,), (low,) = leaves
    codes = packing.unpack_tile_to_float(words, self.bits)
    return _add_steps(codes, scale, low)

  def _low_and_scale(
    self, least: Array, greatest: Array
  ) -> tuple[Array, Array]:
    """Returns half the value of code 0 and half the step."""
    # Canonical NaN: backends choose its sign and bits differently.
    least = jnp.where(jnp.isnan(least), jnp.nan, least)
    # Halved first: the range of finite floats is not a finite float.
    low, high = 0.5 * least, 0.5 * greatest
    inverse = jnp.float32(1 / (2**self.bits - 1))
    most = (0.5 * _MOST - low) * inverse * (1 - 2.0**-16)
    return low, _round_scale((high - low) * inverse, _clear_low_bits(most, 0))

  def _codes(self, y: Array, words: Array | None) -> Array:
    """Returns codes, uint32, of elements in steps above the minimum."""
    return _round_to_codes(y, 1.0, 0.0, 2**self.bits - 1, words)


def _add_steps(codes: Array, scale: Array, low: Array) -> Array:
  """Returns the values of float32 codes above `low`."""
  half = codes * scale
  return low + half + half


def _draw_tile_words(seed: Array | None, tile: _block_op.Tile) -> Array | None:
  """Returns the random words of a tile, None without a seed."""
  return None if seed is None else core.random_words_at(seed, tile.position)


def _scale_of(scale: Array, planes: slice) -> Array:
  """Returns scales of some planes; an array of one block has one for all."""
  return scale if len(scale) == 1 else scale[planes]


def _round_scale(scale: Array, most: Array | np.float32) -> Array:
  """Rounds a scale up to 16 significant bits; NaN if it is not finite."""
  # The product with a code is then exact. A sum with that product has the same
  # bits whether or not a backend fuses the product into the sum.
  short = jnp.minimum(_clear_low_bits(scale, 0xFF), most)
  return core.select_or(jnp.isfinite(scale), short, jnp.nan)


def _clear_low_bits(x: Array, add: int) -> Array:
  """Adds to the bits of a float, then clears the 8 lowest."""
  bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(add)
  return lax.bitcast_convert_type(bits & jnp.uint32(_HIGH), jnp.float32)


def _divide(y: Array, scale: Array) -> Array:
  """Returns y / scale, or 0 for a scale too small to divide by."""
  power, short = _normalize(scale)
  return (y * power) * core.select_or(power > 0, 1.0 / short, 0.0)


def _divide_tile(y: Array, scale: Array) -> Array:
  """Returns y / scale with the bits of the reference."""
  # A kernel's floating-point division is off by a bit, which would change
  # codes. The reciprocal of the 16-bit scale is computed in integers instead.
  power, short = _normalize(scale)
  inverse = jnp.where(power > 0, _reciprocal(short), 0.0)
  return (y * power) * inverse


def _normalize(scale: Array) -> tuple[Array, Array]:
  """Returns a power of two and the scale times it, in [2, 4)."""
  # For a scale that is too small to divide by, the power is zero.
  # XLA:CPU multiplies by a reciprocal, which it flushes to zero when the
  # divisor is above 2^126: both are brought near one first.
  exponent = lax.bitcast_convert_type(scale, jnp.uint32) & _EXPONENT
  power = lax.bitcast_convert_type(_EXPONENT - exponent, jnp.float32)
  power = lax.select(scale < _TINY, lax.full_like(power, 0.0), power)
  return power, scale * power


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


def _round_to_codes(
  y: Array, unit: float, middle: float, top: int, words: Array | None
) -> Array:
  """Rounds float32 `y` to codes in [0, top]."""
  # In fixed point: one program would fuse a float product with the sum after it
  # and another would not, and the two would round differently.
  fixed = (y * (2.0**_POINT / unit)).astype(jnp.int32)
  if words is None:
    half: Array | int = 2 ** (_POINT - 1)
  else:
    half = (words >> (32 - _POINT)).astype(jnp.int32)
  codes = (fixed + (half + int(middle * 2**_POINT))) >> _POINT
  # The clip also gives NaN a code that cannot spill into its neighbors' bits.
  return lax.clamp(np.int32(0), codes, np.int32(top)).astype(jnp.uint32)
