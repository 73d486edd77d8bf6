"""Hadamard rotations of blocks."""

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, random_words


def hadamard(rows: Array) -> Array:
  """Multiplies each row by the Hadamard matrix over the root of its length.

  Orthonormal and its own inverse; H[i, j] is minus where i & j has an odd
  number of bits.

  Args:
    rows: float32[blocks, length], length a power of two.

  Example:
    >>> hadamard(jnp.array([[1.0, 2.0, 3.0, 4.0]])).tolist()
    [[5.0, -1.0, -2.0, 0.0]]
  """
  length = rows.shape[1]
  # A power of two first, so that no partial sum is far above the row's norm and
  # a product fused with an addition rounds as it does alone; the rest last.
  first = 2.0 ** -(length.bit_length() // 2)
  y = rows * jnp.float32(first)
  # Butterflies: products with small matrices are 2x as fast on the host, but
  # round to other bits under jit, under vmap and for another number of rows.
  half = 1
  while half < length:
    pairs = y.reshape(-1, 2, half)
    a, b = pairs[:, :1], pairs[:, 1:]
    y = jnp.concatenate([a + b, a - b], axis=1)
    half *= 2
  return y.reshape(rows.shape) * jnp.float32(length**-0.5 / first)


def flip_signs(rows: Array, seed: int) -> Array:
  """Flips the sign of half of the values, by a hash of seed and position.

  Args:
    rows: float32 of any shape.
    seed: 0 to 2^32 - 1.
  """
  sign = (random_words(jnp.uint32(seed), rows.shape) >> 31) << 31
  bits = lax.bitcast_convert_type(rows, jnp.uint32) ^ sign
  return lax.bitcast_convert_type(bits, jnp.float32)
