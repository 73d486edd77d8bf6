"""How an array is cut into planes and blocks."""

import math

import jax.numpy as jnp
import numpy as np

from jaxmotion.core import Array, Like


def block_shape(size: int, planes: int, block: int) -> tuple[int, int, int]:
  """Returns (planes, blocks in a plane, values in a block).

  Blocks are contiguous runs of at most `block` values, all of one width, so
  that fewer than `planes * blocks` values are padding.

  Args:
    size: number of values.
    planes: number of planes.
    block: the most values in a block.

  >>> block_shape(10, 8, 512), block_shape(1 << 16, 8, 512)
  ((8, 1, 2), (8, 16, 512))
  """
  length = math.ceil(size / planes)
  count = max(1, math.ceil(length / block))
  return planes, count, math.ceil(length / count)


def to_blocks(x: Array, planes: int, block: int) -> Array:
  """Cuts `x` into f32[planes, blocks, width]; padding repeats the last value.

  Args:
    x: floating array of any shape.
    planes: number of planes.
    block: the most values in a block.
  """
  shape = block_shape(x.size, planes, block)
  flat = x.reshape(-1).astype(jnp.float32)
  padding = math.prod(shape) - x.size
  if padding and x.size:
    # The last value widens no block's range, as a zero would.
    flat = jnp.pad(flat, (0, padding), mode="edge")
  return flat.reshape(shape)


def from_blocks(y: Array, like: Like) -> Array:
  """Inverts `to_blocks`: drops the padding, restores shape and dtype."""
  size = math.prod(like.shape)
  flat = y.reshape(-1)
  flat = flat if flat.size == size else flat[:size]
  return flat.reshape(like.shape).astype(like.dtype)


def block_counts(size: int, planes: int, block: int) -> np.ndarray:
  """Returns how many values of each block are not padding, f32[planes, blocks].

  >>> block_counts(5, 2, 2)
  array([[2., 2.],
         [1., 0.]], dtype=float32)
  """
  p, count, width = block_shape(size, planes, block)
  start = np.arange(p * count) * width
  return np.clip(size - start, 0, width).astype(np.float32).reshape(p, count)


def block_axes(size: int, block: int) -> tuple[int, ...]:
  """Returns the axes of planes, blocks and values that share one scale.

  An array of at most one block has one scale for all planes together: a tiny
  leaf would otherwise carry more scales than values.

  >>> block_axes(10, 512), block_axes(1 << 16, 512)
  ((0, 1, 2), (2,))
  """
  return (0, 1, 2) if size <= block else (2,)
