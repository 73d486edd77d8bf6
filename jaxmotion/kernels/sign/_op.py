"""The sign quantizer as a block op."""

import dataclasses

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_op, _checks, pack
from jaxmotion.kernels.sign import _reference

_PLANES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignOp(_block_op.BlockOp):
  """One bit per element, under the mean magnitude of its block.

  Attributes:
    block: maximum number of elements under one scale.
  """

  block: int

  def __post_init__(self) -> None:
    _checks.check_block(self.block)

  @property
  def planes(self) -> int:
    """Number of planes: the bits of a word."""
    return _PLANES

  def encode(self, x: Array, key: core.Key | None) -> _reference.Signs:
    """Returns signs and one scale per block."""
    return _reference.sign_encode(x, self.block)

  def decode(self, payload: _reference.Signs, like: ShapedLike) -> Array:
    """Returns plus or minus the scale of the block."""
    return _reference.sign_decode(payload, like)

  def layout(self, shape: tuple[int, ...]) -> _block_op.BlockLayout:
    """Returns full blocks: padding would count in their means."""
    return _block_op.layout_blocks(shape, _PLANES, self.block, full=True)

  def decoded_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the planes, the blocks of a plane and their width."""
    return _block_op.block_shape(shape, _PLANES, self.block)

  def leaf_layouts(self) -> tuple[_block_op.LeafLayout, ...]:
    """Returns the layouts of words and scales."""
    return _block_op.LeafLayout(
      tuple(pack.piece_rows(1)), True
    ), _block_op.LeafLayout(((0, _PLANES),), False)

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    codes = (x < 0).astype(jnp.uint32)
    return [words for _, words in pack.pack_tile(codes, 1)], [
      _block_op.tile_mean(x, tile)
    ]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    bits = pack.unpack_tile(words, 1).astype(jnp.int32).astype(jnp.float32)
    return _reference.sign_values(bits, scale)
