"""Uniform quantization of blocks, from the array to packed words.

Scale, rounding and packing are one expression, so that XLA makes one pass of
it. Three choices keep the bits of every backend equal. Scales have 16
significant bits, so that code * scale is exact and may be fused with a sum
(`_round_scale`). Rounding is in fixed point (`_round_to_codes`). Division is by
a normalized scale (`normalize`).
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_op
from jaxmotion.kernels.pack import _reference

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
  """Payload of packed codes around zero and their scales.

  Attributes:
    words: uint32[rows, blocks, width].
    scale: float32[planes, blocks], the step; [1, 1] for an array of one block.
  """

  words: Array
  scale: Array


class MinMax(NamedTuple):
  """Payload of packed codes between the minimum and maximum of a block.

  Attributes:
    words: uint32[rows, blocks, width].
    scale: float32[planes, blocks], half the step (a whole one could overflow).
    low: float32[planes, blocks], the value of code 0.
  """

  words: Array
  scale: Array
  low: Array


def absmax_encode(
  x: Array, bits: int, block: int, key: core.Key | None
) -> Symmetric:
  """Quantizes to 2**bits - 1 levels around zero (two levels for one bit).

  Args:
    x: floating array of any shape.
    bits: width of a code, 1 to 8.
    block: maximum number of elements under one scale.
    key: rounds stochastically by `key.worker`; None rounds to nearest.
  """
  peak = _block_op.reduce_blocks(
    x, _reference.num_planes(bits), block, _block_op.max_magnitude
  )
  scale = absmax_scale(peak, bits)
  codes = [
    (
      planes,
      absmax_codes(
        _divide(b, _scale_of(scale, planes)), bits, _random_words_of(key, b)
      ),
    )
    for planes, b in _cut(x, bits, block, key)
  ]
  return Symmetric(_reference.pack_cut(codes, bits), scale[..., 0])


def absmax_scale(peak: Array, bits: int) -> Array:
  """Returns the steps, float32, of blocks with these greatest magnitudes."""
  _, middle, unit = _levels(bits)
  steps = unit * middle
  # By numpy, not `_clear_low_bits`: Pallas kernels take no operation whose
  # arguments are all constants.
  most = np.float32(np.float32(_MOST / steps) * (1 - 2.0**-16))
  short = (most.view(np.uint32) & np.uint32(_HIGH)).view(np.float32)
  return _round_scale(peak * jnp.float32(1 / steps), short)


def absmax_codes(y: Array, bits: int, words: Array | None) -> Array:
  """Returns codes, uint32, of elements measured in steps."""
  top, middle, unit = _levels(bits)
  return _round_to_codes(y, unit, middle, top, words)


def absmax_values(codes: Array, bits: int) -> Array:
  """Returns the values in steps, float32, of float32 codes."""
  _, middle, unit = _levels(bits)
  return (codes if unit == 1 else unit * codes) - unit * middle


def absmax_decode(payload: Symmetric, like: ShapedLike, bits: int) -> Array:
  """Inverts `absmax_encode` up to rounding."""
  y = absmax_values(_reference.unpack_to_float(payload.words, bits), bits)
  return _block_op.from_blocks(y * lax.expand_dims(payload.scale, (2,)), like)


def minmax_encode(
  x: Array, bits: int, block: int, key: core.Key | None
) -> MinMax:
  """Quantizes to 2**bits levels from a block's minimum to its maximum.

  Args:
    x: floating array of any shape.
    bits: width of a code, 1 to 8.
    block: maximum number of elements under one scale.
    key: rounds stochastically by `key.worker`; None rounds to nearest.
  """
  least, greatest = (
    _block_op.reduce_blocks(x, _reference.num_planes(bits), block, reduce)
    for reduce in (_block_op.min_element, _block_op.max_element)
  )
  low, scale = minmax_scale(least, greatest, bits)
  codes = [
    (
      planes,
      minmax_codes(
        _divide(0.5 * b - _scale_of(low, planes), _scale_of(scale, planes)),
        bits,
        _random_words_of(key, b),
      ),
    )
    for planes, b in _cut(x, bits, block, key)
  ]
  return MinMax(
    _reference.pack_cut(codes, bits), scale[..., 0], 2 * low[..., 0]
  )


def minmax_scale(
  least: Array, greatest: Array, bits: int
) -> tuple[Array, Array]:
  """Returns half the value of code 0 and half the step."""
  # Canonical NaN: backends choose its sign and bits differently.
  least = jnp.where(jnp.isnan(least), jnp.nan, least)
  # Halved first: the range of finite floats is not a finite float.
  low, high = 0.5 * least, 0.5 * greatest
  share = jnp.float32(1 / (2**bits - 1))
  most = (0.5 * _MOST - low) * share * (1 - 2.0**-16)
  return low, _round_scale((high - low) * share, _clear_low_bits(most, 0))


def minmax_codes(y: Array, bits: int, words: Array | None) -> Array:
  """Returns codes, uint32, of elements in steps above the minimum."""
  return _round_to_codes(y, 1.0, 0.0, 2**bits - 1, words)


def minmax_decode(payload: MinMax, like: ShapedLike, bits: int) -> Array:
  """Inverts `minmax_encode` up to rounding."""
  codes = _reference.unpack_to_float(payload.words, bits)
  y = minmax_values(codes, payload.scale[..., None], payload.low[..., None])
  return _block_op.from_blocks(y, like)


def minmax_values(codes: Array, scale: Array, low: Array) -> Array:
  """Returns the values of float32 codes above `low`."""
  half = codes * scale
  return low + half + half


def _cut(
  x: Array, bits: int, block: int, key: core.Key | None
) -> list[tuple[slice, Array]]:
  """Returns numbers of planes and their blocks, as `pack_cut` takes codes."""
  planes = _reference.num_planes(bits)
  if key is None and bits == min(_reference.field_widths(bits)):
    return _block_op.cut_planes(x, planes, block)
  return [(slice(0, planes), _block_op.to_blocks(x, planes, block))]


def _scale_of(scale: Array, planes: slice) -> Array:
  """Returns scales of some planes; an array of one block has one for all."""
  return scale if len(scale) == 1 else scale[planes]


def _random_words_of(key: core.Key | None, b: Array) -> Array | None:
  return None if key is None else core.random_words(key.worker, b.shape)


def _levels(bits: int) -> tuple[int, float, float]:
  """Returns (highest code, code of zero, scales between two codes)."""
  if bits == 1:
    # Two scales apart: the step is twice the peak, which may be infinite.
    return 1, 0.5, 2.0
  steps = 2 ** (bits - 1) - 1
  return 2 * steps, float(steps), 1.0


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
  power, short = normalize(scale)
  return (y * power) * core.select_or(power > 0, 1.0 / short, 0.0)


def normalize(scale: Array) -> tuple[Array, Array]:
  """Returns a power of two and the scale times it, in [2, 4)."""
  # For a scale that is too small to divide by, the power is zero.
  # XLA:CPU multiplies by a reciprocal, which it flushes to zero when the
  # divisor is above 2^126: both are brought near one first.
  exponent = lax.bitcast_convert_type(scale, jnp.uint32) & _EXPONENT
  power = lax.bitcast_convert_type(_EXPONENT - exponent, jnp.float32)
  power = lax.select(scale < _TINY, lax.full_like(power, 0.0), power)
  return power, scale * power


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
