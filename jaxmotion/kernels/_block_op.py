"""The base of ops on blocks, for whole arrays and for tiles inside a kernel."""

import abc
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_layout

# Shape of the array whose payload shows the layout of all payloads.
_SAMPLE_SHAPE = (64, 1024)


class LeafLayout(NamedTuple):
  """Division of one leaf of a payload into rows, blocks and elements."""

  # (first row, rows) of each piece that a tile stores separately.
  pieces: tuple[tuple[int, int], ...]
  # True if the leaf has an entry for each element of a block, False if it has
  # one for each block.
  per_element: bool

  @property
  def rows(self) -> int:
    """Number of rows of all pieces."""
    return sum(count for _, count in self.pieces)


class BlockLayout(NamedTuple):
  """Division of a flat array into planes, blocks and elements."""

  # Number of planes, contiguous runs of the array that are packed into the same
  # words.
  planes: int
  blocks: int  # Blocks per plane, contiguous runs of it with one scale each.
  width: int  # Elements per block.
  size: int  # Elements of the array; positions from there on are padding.

  @property
  def is_padded(self) -> bool:
    """Whether the last block reaches beyond the end of the array."""
    return self.planes * self.blocks * self.width != self.size

  def leaf_shape(self, leaf: LeafLayout) -> tuple[int, ...]:
    """Returns the shape of a leaf of a payload."""
    shape = leaf.rows, self.blocks
    return (*shape, self.width) if leaf.per_element else shape


class Tile(NamedTuple):
  """Some neighboring blocks of every plane, rounded up to powers of two.

  Triton needs tile dimensions that are powers of two. A dimension that is not
  one is rounded up, and `inside` masks the entries beyond it.
  """

  # uint32[planes, blocks, width], index in the flat, padded array.
  position: Array
  # bool of that shape, False where a tile dimension reaches beyond the layout;
  # None if none does.
  inside: Array | None
  width: int  # Elements per block, all of them inside.


class BlockOp(abc.ABC):
  """A quantizer of blocks, for whole arrays and for tiles inside a kernel.

  `encode` and `decode` are the reference, which XLA compiles. `encode_tile`
  and `decode_tile` compute the same bits for one tile, with operations that
  Triton supports: no slices, no concatenations, no tables of constants.

  Subclasses are frozen dataclasses of plain values.
  """

  @property
  @abc.abstractmethod
  def planes(self) -> int:
    """Number of planes that the array is divided into."""

  @property
  def needs_key(self) -> bool:
    """Whether `encode` draws random numbers."""
    return False

  @property
  def uses_positions(self) -> bool:
    """Whether what blocks are encoded to depends on where they stand."""
    return self.needs_key

  @abc.abstractmethod
  def encode(self, x: Array, key: core.Key | None) -> PyTree:
    """Encodes an array of any shape."""

  @abc.abstractmethod
  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes a payload to the shape and dtype of `like`."""

  @abc.abstractmethod
  def layout(self, shape: tuple[int, ...]) -> BlockLayout:
    """Returns the division of an array of this shape into blocks.

    Raises:
      NotImplementedError: the array has no tiles that can be encoded
        independently.
    """

  def decoded_shape(
    self, shape: tuple[int, ...]
  ) -> tuple[int, int, int] | None:
    """Returns the blocks of an array if `decode` may return them as they are.

    `decode` then takes a `like` of that shape, padding included, and each
    element depends on its own code and scale alone.

    Args:
      shape: shape of the array.

    Returns:
      (planes, blocks, width), or None if `decode` needs the array's own shape.
    """
    return None

  @abc.abstractmethod
  def leaf_layouts(self) -> tuple[LeafLayout, ...]:
    """Returns the layout of each leaf of a payload, in their order."""

  @abc.abstractmethod
  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf.

    Args:
      x: f32[planes, blocks, width], zeros where it is not inside.
      tile: position of the tile in the array.
      seed: uint32[], for an op with `needs_key`.

    Returns:
      For each leaf its pieces, [rows, blocks, width or 1].
    """

  @abc.abstractmethod
  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes the pieces of one tile to f32[planes, blocks, width]."""


class ScaledOp(BlockOp):
  """Base of ops whose payloads are words of all planes and scales of blocks.

  Subclasses have the field `block`, the maximum number of elements under one
  scale.
  """

  block: int
  scale_leaves: ClassVar[int] = 1

  @property
  def word_rows(self) -> int:
    """Number of rows of words."""
    return 1

  @property
  def needs_full_blocks(self) -> bool:
    """Whether padding would change the scale of its block."""
    return False

  def layout(self, shape: tuple[int, ...]) -> BlockLayout:
    """Returns blocks with one scale each."""
    size = math.prod(shape)
    if size <= self.block:
      raise NotImplementedError(f"arrays of one block ({size} values)")
    layout = BlockLayout(*self.decoded_shape(shape), size)
    if self.needs_full_blocks:
      reject_padding(layout)
    return layout

  def decoded_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the planes, the blocks of a plane and their width."""
    return _block_layout.block_shape(shape, self.planes, self.block)

  def leaf_layouts(self) -> tuple[LeafLayout, ...]:
    """Returns the layouts of words and scales."""
    return list_leaves(self.word_rows, self.planes, self.scale_leaves)


def list_leaves(rows: int, planes: int, scales: int) -> tuple[LeafLayout, ...]:
  """Returns the layouts of words, row by row, and of scales of all planes."""
  words = LeafLayout(tuple((row, 1) for row in range(rows)), True)
  return words, *[LeafLayout(((0, planes),), False)] * scales


def fill_outside(x: Array, tile: Tile, value: Any) -> Array:
  """Replaces the entries of a tile that are not inside it."""
  return x if tile.inside is None else jnp.where(tile.inside, x, value)


def reject_padding(layout: BlockLayout) -> None:
  """Raises NotImplementedError unless all blocks are full."""
  if layout.is_padded:
    raise NotImplementedError(
      f"{layout.size} values are not {layout.planes} planes of whole blocks of "
      f"{layout.width}"
    )


def tile_mean(x: Array, tile: Tile) -> Array:
  """Returns the mean |x| of each block of a tile: [p, b, 1]."""
  total = jnp.sum(jnp.abs(x), axis=2, keepdims=True)
  return total * jnp.float32(1 / tile.width)


def tile_peak(x: Array) -> Array:
  """Returns the greatest |x| of each block, NaN if it has one: [p, b, 1]."""
  # Magnitudes are compared as integers, where NaN is above infinity: the
  # maximum of floats drops NaN on a GPU.
  bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
  peak = jnp.max(bits, axis=2, keepdims=True)
  return lax.bitcast_convert_type(peak, jnp.float32)


def describe_payload(op: BlockOp, like: ShapedLike) -> PyTree:
  """Returns the payload of an array, its leaves as ShapeDtypeStructs."""
  # A program has arrays of many shapes, and to trace an encoder takes 10 ms. So
  # where the payload of one sample is laid out in blocks, only the sample is
  # traced.
  return _describe(op, tuple(like.shape), jnp.dtype(like.dtype).name)


@functools.lru_cache(maxsize=4096)
def _describe(op: BlockOp, shape: tuple[int, ...], dtype: str) -> PyTree:
  """Computes the shapes of a payload from its layout, or else traces it."""
  try:
    shapes = _leaf_shapes(op, shape)
    sample_shapes = _leaf_shapes(op, _SAMPLE_SHAPE)
  except NotImplementedError:
    return _trace_payload(op, shape, dtype)
  leaves, tree = jax.tree.flatten(_trace_payload(op, _SAMPLE_SHAPE, dtype))
  if [leaf.shape for leaf in leaves] != sample_shapes:
    return _trace_payload(op, shape, dtype)
  pairs = zip(leaves, shapes, strict=True)
  found = [jax.ShapeDtypeStruct(shape, leaf.dtype) for leaf, shape in pairs]
  return jax.tree.unflatten(tree, found)


@functools.lru_cache(maxsize=4096)
def _trace_payload(op: BlockOp, shape: tuple[int, ...], dtype: str) -> PyTree:
  """Returns the shapes of a payload by an abstract run of the encoder."""
  found = jax.eval_shape(
    lambda x, seed: op.encode(x, core.Key(seed, seed)),
    jax.ShapeDtypeStruct(shape, dtype),
    jax.ShapeDtypeStruct((), jnp.uint32),
  )
  # The types of a map's mesh belong to this call; the shapes hold for all.
  return jax.tree.map(core.shape_dtype, found)


def _leaf_shapes(op: BlockOp, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
  """Returns the shapes of a payload that is laid out in blocks."""
  layout = op.layout(shape)
  return [layout.leaf_shape(leaf) for leaf in op.leaf_layouts()]
