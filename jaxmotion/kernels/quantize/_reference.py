"""Scale, round and pack in one expression, so that XLA makes one pass of it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, Like, random_uniform
from jaxmotion.kernels._blocks import absmax, block_axes, from_blocks, to_blocks
from jaxmotion.kernels.pack import pack, planes, unpack_values

# A scale below this is subnormal, which backends may flush to zero: its block
# decodes to a constant.
_TINY = 2.0**-126


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
  scale = peak * jnp.float32(1 / (unit * middle))
  codes = _round((b / unit) / _divisor(scale), middle, top, key)
  return Symmetric(pack(codes, bits), scale[..., 0])


def absmax_decode(payload: Symmetric, like: Like, bits: int) -> Array:
  """Inverts `absmax_encode` up to rounding."""
  _, middle, unit = _levels(bits)
  codes = unpack_values(payload.words, bits)
  codes = unit * codes - unit * middle
  return from_blocks(codes * payload.scale[..., None], like)


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
  scale = _round_up((high - low) * jnp.float32(1 / top))
  codes = _round((0.5 * b - low) / _divisor(scale), 0.0, top, key)
  return MinMax(pack(codes, bits), scale[..., 0], 2 * low[..., 0])


def minmax_decode(payload: MinMax, like: Like, bits: int) -> Array:
  """Inverts `minmax_encode` up to rounding."""
  codes = unpack_values(payload.words, bits)
  half = codes * payload.scale[..., None]
  return from_blocks(payload.low[..., None] + half + half, like)


def _levels(bits: int) -> tuple[int, float, float]:
  """(the highest code, the code of zero, scales between codes)."""
  if bits == 1:
    # Two scales apart, for twice the peak need not be a finite float.
    return 1, 0.5, 2.0
  steps = 2 ** (bits - 1) - 1
  return 2 * steps, float(steps), 1.0


def _divisor(scale: Array) -> Array:
  """The scale; infinity for one too small to divide by.

  A division, not a product with the reciprocal: what follows is a sum, and a
  backend may fuse a product into it, which rounds differently from program to
  program.
  """
  return jnp.where(scale < _TINY, jnp.inf, scale)


def _round_up(scale: Array) -> Array:
  """Rounds up to 16 significant bits, so that code * scale is exact.

  Then `low + code * scale` has the same bits whether or not a backend fuses
  the product into the sum.
  """
  bits = lax.bitcast_convert_type(scale, jnp.uint32)
  bits = (bits + jnp.uint32(0xFF)) & ~jnp.uint32(0xFF)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _round(y: Array, middle: float, top: int, key: Key | None) -> Array:
  """f32 from -middle up -> uint32 codes in [0, top]."""
  # One sum: compilers merge two constants that are added one after the other,
  # and round differently by it.
  if key is None:
    offset: Array | float = middle + 0.5
  else:
    offset = random_uniform(key.worker, y.shape) + middle
  # Truncation is floor here, and floor(y + 1/2) costs half of round(). The
  # clip also gives NaN a code that cannot spill into its neighbours' bits.
  codes = (y + offset).astype(jnp.int32)
  return jnp.clip(codes, 0, top).astype(jnp.uint32)
