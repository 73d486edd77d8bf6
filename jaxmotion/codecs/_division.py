"""Division of a payload between workers, each of whom averages a part."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxmotion import hosts, kernels
from jaxmotion.core import Array, PyTree, ShapedLike

# Smaller leaves are joined where they are read.
_MIN_APART = 1 << 12


@dataclasses.dataclass(frozen=True)
class Division:
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

  payload_type: ClassVar[Any] = ()
  """Type of payloads whose leaves have no axis of blocks, if there is one."""

  def to_blocks(self, payload: PyTree) -> PyTree:
    """Returns a payload with leaves whose second axis is that of blocks."""
    return payload

  def from_blocks(self, leaves: PyTree) -> PyTree:
    """Returns the payload of which `to_blocks` makes these leaves."""
    return leaves

  def map_blocks(
    self, fn: Callable[..., Array], *states: PyTree, lead: int = 0
  ) -> PyTree:
    """Applies a function to leaves of states, or to the blocks of payloads."""
    # lead: number of axes before those of a state.
    to_blocks, from_blocks = self.to_blocks, self.from_blocks
    for _ in range(lead):
      to_blocks, from_blocks = jax.vmap(to_blocks), jax.vmap(from_blocks)

    def apply(*nodes: PyTree) -> PyTree:
      if not isinstance(nodes[0], self.payload_type):
        return fn(*nodes)
      return from_blocks(jax.tree.map(fn, *map(to_blocks, nodes)))

    is_payload = lambda node: isinstance(node, self.payload_type)
    return jax.tree.map(apply, *states, is_leaf=is_payload)

  def divide(self, payload: PyTree) -> PyTree:
    """Returns the parts of a payload: leaves gain an axis of workers."""
    return jax.vmap(self.from_blocks)(self.divide_blocks(payload))

  def divide_blocks(self, payload: PyTree) -> PyTree:
    """Returns the parts of a payload, leaves (workers, planes, blocks, ...)."""
    return jax.tree.map(self._divide_leaf, self.to_blocks(payload))

  def join(self, parts: PyTree) -> PyTree:
    """Returns the payload of these parts, which may be encoded anew."""
    return self.join_blocks(jax.vmap(self.to_blocks)(parts))

  def join_blocks(self, parts: PyTree) -> PyTree:
    """Returns the payload of parts that are leaves of `divide_blocks`."""
    return self.from_blocks(jax.tree.map(self._join_leaf, parts))

  def join_values(self, parts: Array) -> Array:
    """Returns the array that has these elements in its parts."""
    flat = self._join_leaf(parts).reshape(-1)
    return flat[: math.prod(self.shape)].reshape(self.shape)

  def _divide_leaf(self, leaf: Array) -> Array:
    """Cuts (planes, blocks, ...) into (workers, planes, blocks of one, ...)."""
    planes, blocks, *rest = leaf.shape
    length = self.like.shape[1]
    if padding := self.workers * length - blocks:
      leaf = jnp.pad(leaf, [(0, 0), (0, padding), *[(0, 0)] * len(rest)])
    parts = leaf.reshape(planes, self.workers, length, *rest)
    return jnp.moveaxis(parts, 1, 0)

  def _join_leaf(self, parts: Array) -> Array:
    """Inverts `_divide_leaf`: joins the workers' blocks, drops the padding."""

    def join(parts: Array) -> Array:
      by_plane = jnp.moveaxis(parts, 0, 1)
      joined = by_plane.reshape(by_plane.shape[0], -1, *parts.shape[3:])
      return jax.lax.slice_in_dim(joined, 0, self.blocks, axis=1)

    # XLA:CPU would ask of each element of the array which part it is in.
    is_large = parts.size >= _MIN_APART
    return hosts.write_apart(join, parts) if is_large else join(parts)


def divide_blocks(
  op: kernels.BlockOp, like: ShapedLike, workers: int
) -> Division | None:
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
  return Division(
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
