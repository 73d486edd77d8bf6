"""The bits of floating-point arrays, and choices between elements."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import _tree


def word_dtype(dtype: Any) -> jnp.dtype:
  """Returns the unsigned integer dtype that is as wide as another dtype.

  >>> word_dtype("bfloat16").name
  'uint16'
  """
  return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def to_bits(x: _tree.Array) -> _tree.Array:
  """Returns the bits of an array as unsigned words of the same width.

  >>> hex(to_bits(jnp.float32(-0.0)))
  '0x80000000'
  """
  # x: any dtype of 1, 2, 4 or 8 bytes.
  return lax.bitcast_convert_type(x, word_dtype(x.dtype))


def from_bits(words: _tree.Array, dtype: Any) -> _tree.Array:
  """Returns the array whose bits are these words; inverts `to_bits`.

  >>> float(from_bits(to_bits(jnp.float32(1.5)), "float32"))
  1.5
  """
  # words: unsigned, as wide as `dtype`.
  return lax.bitcast_convert_type(words, jnp.dtype(dtype))


def select_or(which: _tree.Array, x: _tree.Array, value: float) -> _tree.Array:
  """Returns the elements of `x` where a condition holds, elsewhere a constant.

  >>> select_or(jnp.array([True, False]), jnp.ones(2), 5.0).tolist()
  [1.0, 5.0]
  """
  # As `jnp.where(which, x, value)`, which takes four times as long to trace.
  # which: bool[], or bool of the shape of `x`.
  return lax.select(which, x, lax.full_like(x, value))


def saturate_cast(x: _tree.Array, dtype: Any) -> _tree.Array:
  """Rounds to another float; finite elements saturate, others stay."""
  # A plain cast turns finite elements beyond the greatest float of a narrower
  # dtype into infinities.
  most = float(jnp.finfo(dtype).max)
  if most >= float(jnp.finfo(x.dtype).max):
    return x.astype(dtype)
  # Wide first: bfloat16 does not hold the greatest float16.
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  # Not `clip` alone, which on a GPU may turn NaN into a number.
  clipped = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -most, most), wide)
  return clipped.astype(dtype)
