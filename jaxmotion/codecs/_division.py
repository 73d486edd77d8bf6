"""Division of a payload between workers, each of whom averages a part."""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import hosts, kernels
from jaxmotion.core import Array, PyTree, ShapedLike

# Smaller leaves are joined where they are read.
_MIN_APART = 1 << 12


@dataclasses.dataclass(frozen=True)
class Division(abc.ABC):
  """Divides what a codec makes of one array into a part for each worker.

  A part is the payload of an array of its own. It holds elements from all over
  the array, because a word holds codes of distant elements. So the array is
  encoded, and the mean decoded, as if it were not divided. Parts of the array
  itself would be padded and encoded one by one.

  Attributes:
    like: shape and dtype of the array that a part is the payload of. Its second
      axis is that of blocks.
    shape: shape of the array.
    blocks: blocks of the array, of a plane if there are planes of several.
    workers: number of workers.
  """

  like: jax.ShapeDtypeStruct
  shape: tuple[int, ...]
  blocks: int
  workers: int

  @abc.abstractmethod
  def divide(self, payload: PyTree) -> PyTree:
    """Returns the parts of a payload: leaves gain an axis of workers."""

  @abc.abstractmethod
  def join(self, parts: PyTree) -> PyTree:
    """Returns the payload of these parts, which may be encoded anew."""

  def join_values(self, parts: Array) -> Array:
    """Returns the array that has these elements in its parts."""
    flat = self._join_leaf(parts).reshape(-1)
    return flat[: math.prod(self.shape)].reshape(self.shape)

  def _divide_leaf(self, leaf: Array) -> Array:
    return divide_axis(leaf, 1, self.workers, self.like.shape[1])

  def _join_leaf(self, parts: Array) -> Array:
    return join_axis(parts, 1, self.blocks)


@dataclasses.dataclass(frozen=True)
class BlockDivision(Division):
  """Divides blocks: each worker has some blocks of every plane."""

  def divide(self, payload: PyTree) -> PyTree:
    """Returns the parts of a payload, whose second axis is that of blocks."""
    return jax.tree.map(self._divide_leaf, payload)

  def join(self, parts: PyTree) -> PyTree:
    """Returns the payload of these parts."""
    return jax.tree.map(self._join_leaf, parts)


def divide_blocks(
  op: kernels.BlockOp, like: ShapedLike, workers: int
) -> BlockDivision | None:
  """Returns the division of an op's payload, or None if it has none."""
  # Blocks must decode to the same elements wherever they stand, and be cut
  # alike in an array that consists of a part's blocks alone.
  whole = op.decoded_shape(tuple(like.shape))
  if whole is None or not math.prod(like.shape):
    return None
  planes, blocks, width = whole
  part = planes, _count_blocks(blocks, workers), width
  if op.decoded_shape(part) != part:
    return None
  return BlockDivision(
    jax.ShapeDtypeStruct(part, like.dtype), tuple(like.shape), blocks, workers
  )


def _count_blocks(blocks: int, workers: int) -> int:
  """Returns the blocks per plane of one worker's part, rounded up."""
  # XLA:CPU asks of each element of a loop whether it exists, unless the number
  # of cores divides the loop (2x). So a multiple of 4 or 2 is taken where that
  # adds little.
  each = -(-blocks // workers)
  for multiple, divisor in ((4, 32), (2, 16)):
    rounded = -(-each // multiple) * multiple
    if workers * rounded - blocks <= blocks // divisor:
      return rounded
  return each


def divide_axis(a: Array, axis: int, workers: int, length: int) -> Array:
  """Cuts an axis into parts, padded with zeros: a new axis of workers leads.

  >>> divide_axis(jnp.arange(3), 0, 2, 2).tolist()
  [[0, 1], [2, 0]]
  """
  padding: list[Any] = [(0, 0)] * a.ndim
  padding[axis] = 0, workers * length - a.shape[axis]
  if padding[axis][1]:
    a = jnp.pad(a, padding)
  cut = a.reshape(*a.shape[:axis], workers, length, *a.shape[axis + 1 :])
  return jnp.moveaxis(cut, axis, 0)


def join_axis(parts: Array, axis: int, length: int) -> Array:
  """Joins the parts of an axis that `divide_axis` cut.

  >>> join_axis(jnp.array([[0, 1], [2, 0]]), 0, 3).tolist()
  [0, 1, 2]
  """

  def join(parts: Array) -> Array:
    moved = jnp.moveaxis(parts, 0, axis)
    joined = moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined, 0, length, axis=axis)

  # XLA:CPU would ask of each element of the array which part it is in.
  is_large = parts.size >= _MIN_APART
  return hosts.write_apart(join, parts) if is_large else join(parts)
