"""A rotation before a pass over blocks, in the same pass."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, PyTree, ShapedLike, random_words_at
from jaxmotion.kernels._block_op import BlockOp, Cut, Leaf, Tile
from jaxmotion.kernels.rotate._reference import (
  flip,
  hadamard_factors,
  rotate,
  rotate_back,
  row_shape,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotateOp(BlockOp):
  """Rotates rows, then encodes them.

  Attributes:
    op: encodes the rotated rows.
    length: of a row, a power of two.
    seed: of the signs.
  """

  op: BlockOp
  length: int
  seed: int

  @property
  def planes(self) -> int:
    """Planes of the rotated rows."""
    return self.op.planes

  @property
  def needs_key(self) -> bool:
    """Whether the op does."""
    return self.op.needs_key

  def encode(self, x: Array, key: Key | None) -> PyTree:
    """Encodes the rotated rows."""
    return self.op.encode(rotate(x, self.length, self.seed), key)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes and rotates back."""
    rows = self.op.decode(payload, self._rows(math.prod(like.shape)))
    return rotate_back(rows, like, self.seed)

  def cut(self, shape: tuple[int, ...]) -> Cut:
    """The op's cut of whole rows, each in one block.

    Raises:
      NotImplementedError: rows would be padded or cut.
    """
    size = math.prod(shape)
    cut = self.op.cut(self._rows(size).shape)
    if size % self.length or cut.width % self.length:
      raise NotImplementedError(
        f"blocks of {cut.width} of {size} values are not whole rows of "
        f"{self.length}"
      )
    return cut

  def leaves(self) -> tuple[Leaf, ...]:
    """Those of the op."""
    return self.op.leaves()

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Rotates and encodes a tile."""
    words = random_words_at(jnp.uint32(self.seed), tile.position)
    rotated = _hadamard_tile(flip(x, words), self.length)
    return self.op.encode_tile(rotated, tile, seed)

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes and rotates back a tile."""
    y = _hadamard_tile(self.op.decode_tile(leaves, tile), self.length)
    return flip(y, random_words_at(jnp.uint32(self.seed), tile.position))

  def _rows(self, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(row_shape(size, self.length), jnp.float32)


def _hadamard_tile(x: Array, length: int) -> Array:
  """`hadamard` of rows that lie in the last axis of a tile."""
  first, last = hadamard_factors(length)
  y = x * jnp.float32(first)
  half = 1
  while half < length:
    y = y.reshape(-1, 2, half)
    # Sums of two: slices and concatenations are not what kernels can do.
    upper = lax.broadcasted_iota(jnp.int32, y.shape, 1) == 1
    plus = jnp.sum(y, axis=1, keepdims=True)
    minus = jnp.sum(jnp.where(upper, -y, y), axis=1, keepdims=True)
    y = jnp.where(upper, minus, plus)
    half *= 2
  return y.reshape(x.shape) * jnp.float32(last)
