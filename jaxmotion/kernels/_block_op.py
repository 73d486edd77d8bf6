"""What every quantiser of blocks has in common: how it is cut into tiles."""

import abc
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, PyTree, ShapedLike
from jaxmotion.kernels._block_layout import block_shape


class Cut(NamedTuple):
  """How the flat array lies in planes, blocks and values.

  Attributes:
    planes: contiguous runs of the array, packed into the same words.
    blocks: contiguous runs of a plane, each under a scale of its own.
    width: values in a block.
    size: values in the array; positions from there on are padding.
  """

  planes: int
  blocks: int
  width: int
  size: int

  @property
  def is_padded(self) -> bool:
    """Whether the last block is longer than what is left for it."""
    return self.planes * self.blocks * self.width != self.size


class Leaf(NamedTuple):
  """How a leaf of a payload lies: rows, blocks in a row, values in a block.

  Attributes:
    pieces: (first row, rows) of each piece that is made by itself.
    whole: a value for each value of a block; else one for each block.
  """

  pieces: tuple[tuple[int, int], ...]
  whole: bool


class Tile(NamedTuple):
  """Some neighbouring blocks of every plane, with room for powers of two.

  Attributes:
    position: uint32[planes, blocks, width], in the flat, padded array.
    inside: bool of that shape, False where a tile dimension goes beyond the
      cut; None if it never does.
    width: values in a block, all of them inside.
  """

  position: Array
  inside: Array | None
  width: int


class BlockOp(abc.ABC):
  """A quantiser of blocks: whole arrays, and tiles of them inside a kernel.

  `encode` and `decode` are the reference. `encode_tile` and `decode_tile` make
  the same bits of one tile with operations that kernels can be made of.

  Subclasses are frozen dataclasses of plain values.
  """

  @property
  @abc.abstractmethod
  def planes(self) -> int:
    """Planes the array is cut into."""

  @property
  def needs_key(self) -> bool:
    """Whether `encode` makes random choices."""
    return False

  @abc.abstractmethod
  def encode(self, x: Array, key: Key | None) -> PyTree:
    """Encodes an array of any shape."""

  @abc.abstractmethod
  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Inverts `encode` up to rounding."""

  @abc.abstractmethod
  def cut(self, shape: tuple[int, ...]) -> Cut:
    """Returns how an array of this shape is cut.

    Raises:
      NotImplementedError: it has no tiles that can be encoded by themselves.
    """

  @abc.abstractmethod
  def leaves(self) -> tuple[Leaf, ...]:
    """Returns how the leaves of a payload lie, in their order."""

  @abc.abstractmethod
  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes a tile.

    Args:
      x: f32[planes, blocks, width], zeros where it is not inside.
      tile: where it lies.
      seed: uint32[], of an op that draws.

    Returns:
      For each leaf its pieces, [rows, blocks, width or 1].
    """

  @abc.abstractmethod
  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes a tile: f32[planes, blocks, width]."""


def fill(x: Array, tile: Tile, value: Any) -> Array:
  """Replaces what is not inside."""
  return x if tile.inside is None else jnp.where(tile.inside, x, value)


def cut_blocks(
  shape: tuple[int, ...], planes: int, block: int, *, whole: bool = False
) -> Cut:
  """Returns the cut into blocks with a scale each.

  Args:
    shape: of the array.
    planes: number of planes.
    block: the most values in a block.
    whole: whether padding is refused.

  Raises:
    NotImplementedError: the array has one scale for all planes, or padding.
  """
  size = math.prod(shape)
  if size <= block:
    raise NotImplementedError(f"arrays of one block ({size} values)")
  cut = Cut(*block_shape(shape, planes, block), size)
  if whole:
    refuse_padding(cut)
  return cut


def refuse_padding(cut: Cut) -> None:
  """Raises NotImplementedError unless the blocks are full."""
  if cut.is_padded:
    raise NotImplementedError(
      f"{cut.size} values are not {cut.planes} planes of whole blocks of "
      f"{cut.width}"
    )


def mean_tile(x: Array, tile: Tile) -> Array:
  """Returns the mean |x| of each block: [p, b, 1]."""
  total = jnp.sum(jnp.abs(x), axis=2, keepdims=True)
  return total * jnp.float32(1 / tile.width)


def peak_tile(x: Array) -> Array:
  """Returns the greatest |x| of each block, NaN if there is one: [p, b, 1]."""
  # As integers: NaN is above infinity above all.
  bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
  peak = jnp.max(bits, axis=2, keepdims=True)
  return lax.bitcast_convert_type(peak, jnp.float32)
