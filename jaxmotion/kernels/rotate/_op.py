"""A Hadamard rotation before a block op, in the same pass."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op
from jaxmotion.kernels.rotate import _reference

_LENGTHS = tuple(2**i for i in range(17))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotateOp(_block_op.BlockOp):
  """Rotates rows, then encodes them with another op.

  Attributes:
    op: encodes the rotated rows.
    length: length of a row, a power of two.
    seed: seed of the random signs.
  """

  op: _block_op.BlockOp
  length: int
  seed: int

  def __post_init__(self) -> None:
    core.check_instance("op", self.op, _block_op.BlockOp, "a BlockOp")
    core.check_choice("length", self.length, _LENGTHS)
    core.check_int("seed", self.seed, 0, 2**32 - 1)

  @property
  def planes(self) -> int:
    """Number of planes of the rotated rows."""
    return self.op.planes

  @property
  def needs_key(self) -> bool:
    """Whether the op of the rotated rows needs a key."""
    return self.op.needs_key

  @property
  def uses_positions(self) -> bool:
    """Whether blocks depend on where they stand: the random signs do."""
    return True

  def encode(self, x: Array, key: core.Key | None) -> PyTree:
    """Rotates the array and encodes the rows."""
    return self.op.encode(_reference.rotate(x, self.length, self.seed), key)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes the rows and rotates them back."""
    rows = self.op.decode(payload, self._rotated_like(math.prod(like.shape)))
    return _reference.rotate_back(rows, like, self.seed)

  def layout(self, shape: tuple[int, ...]) -> _block_op.BlockLayout:
    """Returns the op's layout, of whole rows in one block each.

    Raises:
      NotImplementedError: rows would be padded or divided between blocks.
    """
    size = math.prod(shape)
    layout = self.op.layout(self._rotated_like(size).shape)
    if size % self.length or layout.width % self.length:
      raise NotImplementedError(
        f"blocks of {layout.width} of {size} values are not whole rows of "
        f"{self.length}"
      )
    return layout

  def leaf_layouts(self) -> tuple[_block_op.LeafLayout, ...]:
    """Returns the leaf layouts of the op."""
    return self.op.leaf_layouts()

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Rotates and encodes one tile."""
    words = core.random_words_at(jnp.uint32(self.seed), tile.position)
    rotated = _hadamard_tile(_reference.flip_by_words(x, words), self.length)
    return self.op.encode_tile(rotated, tile, seed)

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes one tile and rotates it back."""
    y = _hadamard_tile(self.op.decode_tile(leaves, tile), self.length)
    return _reference.flip_by_words(
      y, core.random_words_at(jnp.uint32(self.seed), tile.position)
    )

  def _rotated_like(self, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
      _reference.row_shape(size, self.length), jnp.float32
    )


def _hadamard_tile(x: Array, length: int) -> Array:
  """Computes `hadamard` of rows that lie in the last axis of a tile."""
  first, last = _reference.hadamard_factors(length)
  y = x * jnp.float32(first)
  half = 1
  while half < length:
    y = y.reshape(-1, 2, half)
    # Sums over pairs: Triton supports neither slices nor concatenations.
    upper = lax.broadcasted_iota(jnp.int32, y.shape, 1) == 1
    plus = jnp.sum(y, axis=1, keepdims=True)
    minus = jnp.sum(jnp.where(upper, -y, y), axis=1, keepdims=True)
    y = jnp.where(upper, minus, plus)
    half *= 2
  return y.reshape(x.shape) * jnp.float32(last)
