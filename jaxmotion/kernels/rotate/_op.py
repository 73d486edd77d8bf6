"""Random Hadamard rotations of rows, alone and before a block op."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_layout, _block_op

_LENGTHS = tuple(2**i for i in range(17))


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  op=core.instance(_block_op.BlockOp, "a BlockOp"),
  length=core.choice(_LENGTHS),
  seed=core.seed,
)
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
    return self.op.encode(rotate(x, self.length, self.seed), key)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes the rows and rotates them back."""
    rows = self.op.decode(payload, self._rotated_like(math.prod(like.shape)))
    return rotate_back(rows, like, self.seed)

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
    rotated = _hadamard_tile(_flip_by_words(x, words), self.length)
    return self.op.encode_tile(rotated, tile, seed)

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes one tile and rotates it back."""
    y = _hadamard_tile(self.op.decode_tile(leaves, tile), self.length)
    return _flip_by_words(
      y, core.random_words_at(jnp.uint32(self.seed), tile.position)
    )

  def _rotated_like(self, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(_row_shape(size, self.length), jnp.float32)


def _hadamard_tile(x: Array, length: int) -> Array:
  """Computes `hadamard` of rows that lie in the last axis of a tile."""
  first, last = _hadamard_factors(length)
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


def hadamard(rows: Array) -> Array:
  """Multiplies each row by the Hadamard matrix over the root of its length.

  >>> hadamard(jnp.array([[1.0, 2.0, 3.0, 4.0]])).tolist()
  [[5.0, -1.0, -2.0, 0.0]]
  """
  # Orthonormal and its own inverse: H[i, j] is minus where i & j has an odd
  # number of bits.
  length = rows.shape[1]
  # Butterflies: products with small matrices are 2x as fast on the host, but
  # round to other bits under jit, under vmap and for another number of rows.
  # Two levels a pass: XLA:CPU computes those twice that fuse with the next.
  halves = [2**i for i in range(length.bit_length() - 1)]
  passes = [halves[i : i + 2] for i in range(0, len(halves), 2)] or [[]]
  first, last = _hadamard_factors(length)
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


def _hadamard_factors(length: int) -> tuple[float, float]:
  """Returns the factors to multiply by before and after the additions."""
  # A power of two first, so that no partial sum is far above the row's norm and
  # a product fused with an addition rounds as it does alone; the rest last.
  first = 2.0 ** -(length.bit_length() // 2)
  return first, length**-0.5 / first


def flip_signs(rows: Array, seed: int) -> Array:
  """Flips the sign of half of the elements, by a hash of seed and position."""
  return _flip_by_words(rows, core.random_words(jnp.uint32(seed), rows.shape))


def _flip_by_words(x: Array, words: Array) -> Array:
  """Flips the sign of float32 elements where a word's highest bit is set."""
  bits = lax.bitcast_convert_type(x, jnp.uint32) ^ ((words >> 31) << 31)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _to_rows(x: Array, block: int) -> Array:
  """Divides an array into rows, float32, with zeros filling the last."""
  blocks, width = _row_shape(x.size, block)
  flat = x.reshape(-1).astype(jnp.float32)
  return _block_layout.pad_to_multiple(flat, width).reshape(blocks, width)


def _row_shape(size: int, block: int) -> tuple[int, int]:
  """Returns the number of rows and their length.

  >>> _row_shape(300, 128), _row_shape(5, 128)
  ((3, 128), (1, 8))
  """
  width = min(block, 1 << max(0, size - 1).bit_length())
  return -(-size // width), width


def _from_rows(rows: Array, like: ShapedLike) -> Array:
  """Inverts `_to_rows`, to the shape and dtype of `like`."""
  flat = rows.reshape(-1)[: math.prod(like.shape)]
  return core.saturate_cast(flat.reshape(like.shape), like.dtype)


def rotate(x: Array, block: int, seed: int) -> Array:
  """Rotates the rows of an array.

  Args:
    x: floating array of any shape, cut into rows; zeros fill the last.
    block: length of a row, a power of two. A shorter array is one row of the
      next power of two.
    seed: seed of the random signs, 0 to 2^32 - 1.

  Returns:
    float32[rows, length].
  """
  return hadamard(flip_signs(_to_rows(x, block), seed))


def rotate_back(rows: Array, like: ShapedLike, seed: int) -> Array:
  """Inverts `rotate`, to the shape and dtype of `like`."""
  return _from_rows(flip_signs(hadamard(rows), seed), like)
