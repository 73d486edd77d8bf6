"""The sign quantizer as a block op."""

import dataclasses

import jax.numpy as jnp

from jaxmotion.core import Array, Key, ShapedLike
from jaxmotion.kernels._block_layout import block_shape
from jaxmotion.kernels._block_op import (
  BlockLayout,
  BlockOp,
  LeafLayout,
  Tile,
  layout_blocks,
  tile_mean,
)
from jaxmotion.kernels._checks import check_block
from jaxmotion.kernels.pack import pack_tile, piece_rows, unpack_tile
from jaxmotion.kernels.sign._reference import (
  Signs,
  sign_decode,
  sign_encode,
  sign_values,
)

_PLANES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignOp(BlockOp):
  """One bit per element, under the mean magnitude of its block.

  Attributes:
    block: maximum number of elements under one scale.
  """

  block: int

  def __post_init__(self) -> None:
    check_block(self.block)

  @property
  def planes(self) -> int:
    """Number of planes: the bits of a word."""
    return _PLANES

  def encode(self, x: Array, key: Key | None) -> Signs:
    """Returns signs and one scale per block."""
    return sign_encode(x, self.block)

  def decode(self, payload: Signs, like: ShapedLike) -> Array:
    """Returns plus or minus the scale of the block."""
    return sign_decode(payload, like)

  def layout(self, shape: tuple[int, ...]) -> BlockLayout:
    """Returns full blocks: padding would count in their means."""
    return layout_blocks(shape, _PLANES, self.block, full=True)

  def decoded_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the planes, the blocks of a plane and their width."""
    return block_shape(shape, _PLANES, self.block)

  def leaf_layouts(self) -> tuple[LeafLayout, ...]:
    """Returns the layouts of words and scales."""
    return LeafLayout(tuple(piece_rows(1)), True), LeafLayout(
      ((0, _PLANES),), False
    )

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    codes = (x < 0).astype(jnp.uint32)
    return [words for _, words in pack_tile(codes, 1)], [tile_mean(x, tile)]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    bits = unpack_tile(words, 1).astype(jnp.int32).astype(jnp.float32)
    return sign_values(bits, scale)
