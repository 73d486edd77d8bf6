"""Hadamard rotations of blocks."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion.core import Array, random_words

# H of p q values is H of p times H of q (a Kronecker product): beyond _WHOLE,
# two products with small matrices, 2x as fast on the host as one of 128.
_WHOLE, _INNER = 64, 16


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
  blocks, length = rows.shape
  inner = length if length <= _WHOLE else _INNER
  outer = length // inner
  # Scaled first: no partial sum is then greater than the row's norm.
  y = jnp.matmul(
    (rows * jnp.float32(length**-0.5)).reshape(-1, inner),
    jnp.asarray(_matrix(inner)),
    precision=lax.Precision.HIGHEST,
  )
  if inner == length:
    return y.reshape(blocks, length)
  # Matrix products both: a sum over an axis would add in another order, and
  # round to other bits, once it is fused.
  y = jnp.einsum(
    "ij,bjk->bik",
    jnp.asarray(_matrix(outer)),
    y.reshape(blocks, outer, inner),
    precision=lax.Precision.HIGHEST,
  )
  return y.reshape(blocks, length)


def flip_signs(rows: Array, seed: int) -> Array:
  """Flips the sign of half of the values, by a hash of seed and position.

  Args:
    rows: float32 of any shape.
    seed: 0 to 2^32 - 1.
  """
  sign = (random_words(jnp.uint32(seed), rows.shape) >> 31) << 31
  bits = lax.bitcast_convert_type(rows, jnp.uint32) ^ sign
  return lax.bitcast_convert_type(bits, jnp.float32)


def _matrix(length: int) -> np.ndarray:
  i = np.arange(length)
  odd = np.bitwise_count(i[:, None] & i[None]) & 1
  return np.where(odd, -1, 1).astype(np.float32)
