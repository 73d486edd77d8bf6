"""Arithmetic of 32-bit words that takes several operations."""

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array


def mul_high(a: Array, b: Array) -> Array:
  """Returns floor(a * b / 2**32), the high word of a product of words.

  If `a` is uniform over all words, the result is uniform over 0 .. b - 1, up to
  a share of at most b / 2**32.

  Args:
    a: uint32 of any shape.
    b: uint32 of the same shape, or a scalar.

  >>> int(mul_high(jnp.uint32(0x80000000), jnp.uint32(6)))
  3
  """
  low = jnp.uint32(0xFFFF)
  a_high, a_low = a >> 16, a & low
  b_high, b_low = b >> 16, b & low
  cross = a_high * b_low + (a_low * b_low >> 16)
  other = a_low * b_high + (cross & low)
  return a_high * b_high + (cross >> 16) + (other >> 16)


def sum_words(words: Array, axis: int) -> Array:
  """Returns the sum of words modulo 2**32 along an axis, which is kept.

  Signed integers are added, whose sums have the same bits: kernels for TPUs add
  no unsigned ones.

  Args:
    words: uint32 of any shape.
    axis: the axis.

  >>> sum_words(jnp.uint32([[2**31, 1], [2**31, 2]]), axis=0).tolist()
  [[0, 3]]
  """
  signed = lax.bitcast_convert_type(words, jnp.int32)
  total = jnp.sum(signed, axis=axis, keepdims=True, dtype=jnp.int32)
  return lax.bitcast_convert_type(total, jnp.uint32)
