"""Scale, round and pack in one expression, so that XLA makes one pass of it."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion.core import Array, Key, ShapedLike, random_words
from jaxmotion.kernels._block_layout import (
  absmax,
  block_axes,
  from_blocks,
  to_blocks,
)
from jaxmotion.kernels.pack._reference import num_planes, pack, unpack_to_float

# A scale below this is too near the subnormals, which backends may flush to
# zero: its block decodes to a constant.
_TINY = 2.0**-120
_MOST = float(np.finfo(np.float32).max)
# The exponent field of a float32.
_EXPONENT = np.uint32(0x7F800000)
# The 16 significant bits of a short scale, and sign and exponent.
_HIGH = 0xFFFFFF00
# Bits behind the point when codes are rounded: 255 has room before it.
_POINT = 22


class Symmetric(NamedTuple):
  """Codes around zero.

  Attributes:
    words: uint32[rows, blocks, width].
    scale: float32[planes, blocks], the step; [1, 1] for an array of one block.
  """

  words: Array
  scale: Array


class MinMax(NamedTuple):
  """Codes between a block's least and greatest value.

  Attributes:
    words: uint32[rows, blocks, width].
    scale: float32[planes, blocks], half the step (a whole one could overflow).
    low: float32[planes, blocks], the value of code 0.
  """

  words: Array
  scale: Array
  low: Array


def absmax_encode(
  x: Array, bits: int, block: int, key: Key | None
) -> Symmetric:
  """Quantises to 2**bits - 1 levels around zero (two levels for one bit).

  Args:
    x: floating array of any shape.
    bits: 1 to 8.
    block: the most values under one scale.
    key: rounds stochastically by `key.worker`; None rounds to nearest.
  """
  b = to_blocks(x, num_planes(bits), block)
  scale = absmax_scale(absmax(b, block_axes(x.size, block)), bits)
  codes = absmax_codes(_divide(b, scale), bits, _words(key, b))
  return Symmetric(pack(codes, bits), scale[..., 0])


def absmax_scale(peak: Array, bits: int) -> Array:
  """Returns the step of blocks whose greatest magnitudes are these."""
  _, middle, unit = _levels(bits)
  steps = unit * middle
  # Not by `_cut`: an operation on nothing but constants is no part of a kernel.
  most = np.float32(np.float32(_MOST / steps) * (1 - 2.0**-16))
  short = (most.view(np.uint32) & np.uint32(_HIGH)).view(np.float32)
  return _short(peak * jnp.float32(1 / steps), short)


def absmax_codes(y: Array, bits: int, words: Array | None) -> Array:
  """Returns codes, uint32, of values in steps.

  Args:
    y: float32.
    bits: 1 to 8.
    words: random ones, uint32 of the same shape; None rounds to nearest.
  """
  top, middle, unit = _levels(bits)
  return _round(y, unit, middle, top, words)


def absmax_values(codes: Array, bits: int) -> Array:
  """Returns the values in steps, float32, of codes that are float32."""
  _, middle, unit = _levels(bits)
  return unit * codes - unit * middle


def absmax_decode(payload: Symmetric, like: ShapedLike, bits: int) -> Array:
  """Inverts `absmax_encode` up to rounding."""
  y = absmax_values(unpack_to_float(payload.words, bits), bits)
  return from_blocks(y * payload.scale[..., None], like)


def minmax_encode(x: Array, bits: int, block: int, key: Key | None) -> MinMax:
  """Quantises to 2**bits levels from a block's minimum to its maximum.

  Args:
    x: floating array of any shape.
    bits: 1 to 8.
    block: the most values under one scale.
    key: rounds stochastically by `key.worker`; None rounds to nearest.
  """
  b = to_blocks(x, num_planes(bits), block)
  axes = block_axes(x.size, block)
  least = jnp.min(b, axis=axes, keepdims=True, initial=jnp.inf)
  greatest = jnp.max(b, axis=axes, keepdims=True, initial=-jnp.inf)
  low, scale = minmax_scale(least, greatest, bits)
  codes = minmax_codes(_divide(0.5 * b - low, scale), bits, _words(key, b))
  return MinMax(pack(codes, bits), scale[..., 0], 2 * low[..., 0])


def minmax_scale(
  least: Array, greatest: Array, bits: int
) -> tuple[Array, Array]:
  """Returns half the value of code 0 and half the step."""
  # One NaN: backends choose its sign and bits differently.
  least = jnp.where(jnp.isnan(least), jnp.nan, least)
  # Passes: the range of finite floats is not a finite float.
  low, high = 0.5 * least, 0.5 * greatest
  share = jnp.float32(1 / (2**bits - 1))
  most = (0.5 * _MOST - low) * share * (1 - 2.0**-16)
  return low, _short((high - low) * share, _cut(most, 0))


def minmax_codes(y: Array, bits: int, words: Array | None) -> Array:
  """Returns codes, uint32, of values in steps above the least one."""
  return _round(y, 1.0, 0.0, 2**bits - 1, words)


def minmax_decode(payload: MinMax, like: ShapedLike, bits: int) -> Array:
  """Inverts `minmax_encode` up to rounding."""
  codes = unpack_to_float(payload.words, bits)
  y = minmax_values(codes, payload.scale[..., None], payload.low[..., None])
  return from_blocks(y, like)


def minmax_values(codes: Array, scale: Array, low: Array) -> Array:
  """Returns the values of codes that are float32."""
  half = codes * scale
  return low + half + half


def _words(key: Key | None, b: Array) -> Array | None:
  return None if key is None else random_words(key.worker, b.shape)


def _levels(bits: int) -> tuple[int, float, float]:
  """(the highest code, the code of zero, scales between codes)."""
  if bits == 1:
    # Two scales apart, for twice the peak need not be a finite float.
    return 1, 0.5, 2.0
  steps = 2 ** (bits - 1) - 1
  return 2 * steps, float(steps), 1.0


def _short(scale: Array, most: Array | np.float32) -> Array:
  """Rounds up to 16 significant bits; NaN for a scale that is not finite.

  The product with a code is then exact, so that a sum with it has the same
  bits whether or not a backend fuses the product into the sum.

  Args:
    scale: float32.
    most: of 16 significant bits; past it levels would be infinite.
  """
  short = jnp.minimum(_cut(scale, 0xFF), most)
  return jnp.where(jnp.isfinite(scale), short, jnp.nan)


def _cut(x: Array, add: int) -> Array:
  """Drops the 8 lowest bits after adding to them."""
  bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(add)
  return lax.bitcast_convert_type(bits & jnp.uint32(_HIGH), jnp.float32)


def _divide(y: Array, scale: Array) -> Array:
  """y / scale; 0 for a scale that is too small to divide by."""
  power, short = normalize(scale)
  return (y * power) * jnp.where(power > 0, 1.0 / short, 0.0)


def normalize(scale: Array) -> tuple[Array, Array]:
  """Returns a power of two and the scale times it, in [2, 4).

  Zero and anything for a scale that is too small to divide by.
  """
  # XLA:CPU multiplies by a reciprocal, which it flushes to zero when the
  # divisor is above 2^126: both are brought near one first.
  exponent = lax.bitcast_convert_type(scale, jnp.uint32) & _EXPONENT
  power = lax.bitcast_convert_type(_EXPONENT - exponent, jnp.float32)
  power = jnp.where(scale < _TINY, 0.0, power)
  return power, scale * power


def _round(
  y: Array, unit: float, middle: float, top: int, words: Array | None
) -> Array:
  """f32, `unit` from code to code and 0 at `middle` -> codes in [0, top]."""
  # In fixed point: after a product, a sum of floats would be fused with it by
  # one program and not by the next, and round differently.
  fixed = (y * (2.0**_POINT / unit)).astype(jnp.int32)
  if words is None:
    half: Array | int = 2 ** (_POINT - 1)
  else:
    half = (words >> (32 - _POINT)).astype(jnp.int32)
  codes = (fixed + (half + int(middle * 2**_POINT))) >> _POINT
  # The clip also gives NaN a code that cannot spill into its neighbours' bits.
  return jnp.clip(codes, 0, top).astype(jnp.uint32)
