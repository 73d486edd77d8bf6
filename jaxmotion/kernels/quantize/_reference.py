"""Scale, round and pack in one expression, so that XLA makes one pass of it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, Like, random_words
from jaxmotion.kernels._blocks import absmax, block_axes, from_blocks, to_blocks
from jaxmotion.kernels.pack import pack, planes, unpack_values

# A scale below this is too near the subnormals, which backends may flush to
# zero: its block decodes to a constant.
_TINY = 2.0**-120
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
  b = to_blocks(x, planes(bits), block)
  top, middle, unit = _levels(bits)
  peak = absmax(b, block_axes(x.size, block))
  scale = _short(peak * jnp.float32(1 / (unit * middle)))
  codes = _round(_divide(b / unit, scale), middle, top, key)
  return Symmetric(pack(codes, bits), scale[..., 0])


def absmax_decode(payload: Symmetric, like: Like, bits: int) -> Array:
  """Inverts `absmax_encode` up to rounding."""
  _, middle, unit = _levels(bits)
  codes = unpack_values(payload.words, bits)
  codes = unit * codes - unit * middle
  return from_blocks(_finite(codes * payload.scale[..., None]), like)


def minmax_encode(x: Array, bits: int, block: int, key: Key | None) -> MinMax:
  """Quantises to 2**bits levels from a block's minimum to its maximum.

  Args:
    x: floating array of any shape.
    bits: 1 to 8.
    block: the most values under one scale.
    key: rounds stochastically by `key.worker`; None rounds to nearest.
  """
  b = to_blocks(x, planes(bits), block, fill="edge")
  axes = block_axes(x.size, block)
  # Halves: the range of finite floats is not a finite float.
  low = 0.5 * jnp.min(b, axis=axes, keepdims=True, initial=jnp.inf)
  high = 0.5 * jnp.max(b, axis=axes, keepdims=True, initial=-jnp.inf)
  top = 2**bits - 1
  scale = _short((high - low) * jnp.float32(1 / top))
  codes = _round(_divide(0.5 * b - low, scale), 0.0, top, key)
  return MinMax(pack(codes, bits), scale[..., 0], 2 * low[..., 0])


def minmax_decode(payload: MinMax, like: Like, bits: int) -> Array:
  """Inverts `minmax_encode` up to rounding."""
  codes = unpack_values(payload.words, bits)
  half = codes * payload.scale[..., None]
  return from_blocks(_finite(payload.low[..., None] + half + half), like)


def _levels(bits: int) -> tuple[int, float, float]:
  """(the highest code, the code of zero, scales between codes)."""
  if bits == 1:
    # Two scales apart, for twice the peak need not be a finite float.
    return 1, 0.5, 2.0
  steps = 2 ** (bits - 1) - 1
  return 2 * steps, float(steps), 1.0


def _short(scale: Array) -> Array:
  """Rounds up to 16 significant bits; NaN for a scale that is not finite.

  The product with a code is then exact, so that a sum with it has the same
  bits whether or not a backend fuses the product into the sum.
  """
  bits = lax.bitcast_convert_type(scale, jnp.uint32)
  bits = (bits + jnp.uint32(0xFF)) & ~jnp.uint32(0xFF)
  short = lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(jnp.isfinite(scale), short, jnp.nan)


def _divide(y: Array, scale: Array) -> Array:
  """y / scale; 0 for a scale that is too small to divide by."""
  # By hand, for XLA:CPU multiplies by a reciprocal that it flushes to zero
  # when the divisor is above 2^126.
  reciprocal = jnp.where(scale < _TINY, 0.0, 1.0 / (0.25 * scale))
  return (0.25 * y) * reciprocal


def _round(y: Array, middle: float, top: int, key: Key | None) -> Array:
  """f32 from -middle up -> uint32 codes in [0, top]."""
  # In fixed point: after a product, a sum of floats would be fused with it by
  # one program and not by the next, and round differently.
  fixed = (y * 2.0**_POINT).astype(jnp.int32)
  if key is None:
    half: Array | int = 2 ** (_POINT - 1)
  else:
    words = random_words(key.worker, y.shape)
    half = (words >> (32 - _POINT)).astype(jnp.int32)
  codes = (fixed + (half + int(middle * 2**_POINT))) >> _POINT
  # The clip also gives NaN a code that cannot spill into its neighbours' bits.
  return jnp.clip(codes, 0, top).astype(jnp.uint32)


def _finite(y: Array) -> Array:
  """Limits levels that were rounded up past the greatest float; NaN stays."""
  most = float(jnp.finfo(jnp.float32).max)
  return jnp.clip(y, -most, most)
