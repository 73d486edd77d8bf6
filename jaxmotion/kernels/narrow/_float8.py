"""Casts to 8-bit floats in 32-bit integer and float16 arithmetic.

Conversions of the backends are not used, for three reasons. XLA:CPU makes slow
code of them (encode 3x, decode 1.6x). Those of NVIDIA GPUs turn infinities into
the greatest finite value. GPUs before Ada have none.
"""

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array
from jaxmotion.kernels import microscaling
from jaxmotion.kernels.microscaling import _reference

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_HALF_NAN = 0x7E00
# Codes of infinity, of the NaN that `encode` returns, and of the least NaN.
# float8_e4m3fn has no infinity.
_SPECIAL = {
  "float8_e4m3fn": (0x7F, 0x7F, 0x7F),
  "float8_e5m2": (0x7C, 0x7E, 0x7D),
}


def encode(x: Array, dtype: str) -> Array:
  """Rounds to nearest even, saturating: uint8 of the shape of `x`."""
  form, (infinity, nan, _) = microscaling.FORMATS[dtype], _SPECIAL[dtype]
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  magnitude = bits & jnp.uint32(_MAGNITUDE)
  v = lax.bitcast_convert_type(magnitude, jnp.float32)
  codes = jnp.minimum(_reference.round_codes(v, form), jnp.uint32(form.most))
  codes = jnp.where(magnitude < _INFINITY, codes, jnp.uint32(infinity))
  codes = jnp.where(magnitude > _INFINITY, jnp.uint32(nan), codes)
  return (codes | ((bits >> 24) & jnp.uint32(0x80))).astype(jnp.uint8)


def decode(words: Array, dtype: str) -> Array:
  """Returns the float32 values whose codes the words are."""
  form, (_, _, nan) = microscaling.FORMATS[dtype], _SPECIAL[dtype]
  wide = words.astype(jnp.uint16)
  magnitude = wide & jnp.uint16(0x7F)
  # A float16 with the same mantissa bits. It has at least as many exponents, so
  # it is the value up to a power of two, also below the least normal.
  half = magnitude << (10 - form.mantissa)
  half = jnp.where(magnitude < nan, half, jnp.uint16(_HALF_NAN))
  half = half | ((wide & jnp.uint16(0x80)) << 8)
  y = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
  return y * 2.0 ** (15 - form.bias)
