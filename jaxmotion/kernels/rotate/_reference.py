"""Random Hadamard rotations of blocks."""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.core import Array, ShapedLike


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
  # Butterflies: products with small matrices are 2x as fast on the host, but
  # round to other bits under jit, under vmap and for another number of rows.
  # Two levels a pass: XLA:CPU computes those twice that fuse with the next.
  halves = [2**i for i in range(length.bit_length() - 1)]
  passes = [halves[i : i + 2] for i in range(0, len(halves), 2)] or [[]]
  first, last = hadamard_factors(length)
  y = rows
  for i, some in enumerate(passes):
    before = first if i == 0 else 1.0
    after = last if i == len(passes) - 1 else 1.0
    y = hosts.write_apart(functools.partial(_add_pairs, some, before, after), y)
  return y


def _add_pairs(
  halves: Sequence[int], before: float, after: float, rows: Array
) -> Array:
  """Replaces a and b, so many elements apart, by a + b and a - b."""
  # `rows`: float32[blocks, length].
  y = rows * jnp.float32(before)
  for half in halves:
    pairs = y.reshape(-1, 2, half)
    # A product with 1 or -1 is exact, and has vectors; a concatenation of sum
    # and difference asks for each element which it is (2x).
    sign = jnp.asarray([[[1.0], [-1.0]]], jnp.float32)
    y = pairs[:, :1] + sign * pairs[:, 1:]
  return y.reshape(rows.shape) * jnp.float32(after)


def hadamard_factors(length: int) -> tuple[float, float]:
  """Returns the factors to multiply by before and after the additions."""
  # A power of two first, so that no partial sum is far above the row's norm and
  # a product fused with an addition rounds as it does alone; the rest last.
  first = 2.0 ** -(length.bit_length() // 2)
  return first, length**-0.5 / first


def flip_signs(rows: Array, seed: int) -> Array:
  """Flips the sign of half of the elements, by a hash of seed and position.

  Args:
    rows: float32 of any shape.
    seed: 0 to 2^32 - 1.
  """
  return flip_by_words(rows, core.random_words(jnp.uint32(seed), rows.shape))


def flip_by_words(x: Array, words: Array) -> Array:
  """Flips the sign of float32 elements where a word's highest bit is set."""
  bits = lax.bitcast_convert_type(x, jnp.uint32) ^ ((words >> 31) << 31)
  return lax.bitcast_convert_type(bits, jnp.float32)


def to_rows(x: Array, block: int) -> Array:
  """Divides an array into rows, float32, with zeros filling the last."""
  blocks, width = row_shape(x.size, block)
  flat = x.reshape(-1).astype(jnp.float32)
  padding = blocks * width - x.size
  flat = jnp.pad(flat, (0, padding)) if padding else flat
  return flat.reshape(blocks, width)


def row_shape(size: int, block: int) -> tuple[int, int]:
  """Returns the number of rows and their length.

  >>> row_shape(300, 128), row_shape(5, 128)
  ((3, 128), (1, 8))
  """
  width = min(block, 1 << max(0, size - 1).bit_length())
  return -(-size // width), width


def from_rows(rows: Array, like: ShapedLike) -> Array:
  """Inverts `to_rows`, to the shape and dtype of `like`."""
  flat = rows.reshape(-1)[: math.prod(like.shape)]
  return core.saturate_cast(flat.reshape(like.shape), like.dtype)


def rotate(x: Array, block: int, seed: int) -> Array:
  """Returns the rotated rows of an array, f32[rows, length]."""
  return hadamard(flip_signs(to_rows(x, block), seed))


def rotate_back(rows: Array, like: ShapedLike, seed: int) -> Array:
  """Inverts `rotate`, to the shape and dtype of `like`."""
  return from_rows(flip_signs(hadamard(rows), seed), like)
