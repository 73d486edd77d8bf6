"""The bits of floating-point arrays, as unsigned words."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import _types


def word_dtype(dtype: Any) -> jnp.dtype:
  """Returns the unsigned integer dtype that is as wide as another dtype.

  >>> word_dtype("bfloat16").name
  'uint16'
  """
  return jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")


def to_bits(x: _types.Array) -> _types.Array:
  """Returns the bits of an array as unsigned words of the same width.

  Args:
    x: array of any dtype of 1, 2, 4 or 8 bytes.

  Returns:
    uint8, uint16, uint32 or uint64 of the shape of `x`.

  >>> hex(to_bits(jnp.float32(-0.0)))
  '0x80000000'
  """
  return lax.bitcast_convert_type(x, word_dtype(x.dtype))


def from_bits(words: _types.Array, dtype: Any) -> _types.Array:
  """Returns the array whose bits are these words; inverts `to_bits`.

  Args:
    words: unsigned words.
    dtype: dtype of the same width.

  >>> float(from_bits(to_bits(jnp.float32(1.5)), "float32"))
  1.5
  """
  return lax.bitcast_convert_type(words, jnp.dtype(dtype))
