"""Signs as a pass over blocks."""

import dataclasses

import jax.numpy as jnp

from jaxmotion.core import Array, Key, ShapedLike
from jaxmotion.kernels._block_op import (
  BlockOp,
  Cut,
  Leaf,
  Tile,
  cut_blocks,
  mean_tile,
)
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
  """A bit a value, the mean magnitude of a block.

  Attributes:
    block: the most values under one scale.
  """

  block: int

  @property
  def planes(self) -> int:
    """Bits of one word."""
    return _PLANES

  def encode(self, x: Array, key: Key | None) -> Signs:
    """Returns signs and a scale a block."""
    return sign_encode(x, self.block)

  def decode(self, payload: Signs, like: ShapedLike) -> Array:
    """Returns plus or minus the scale."""
    return sign_decode(payload, like)

  def cut(self, shape: tuple[int, ...]) -> Cut:
    """Full blocks: padding would count in their means."""
    return cut_blocks(shape, _PLANES, self.block, whole=True)

  def leaves(self) -> tuple[Leaf, ...]:
    """Words and scales."""
    return Leaf(tuple(piece_rows(1)), True), Leaf(((0, _PLANES),), False)

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes a tile."""
    codes = (x < 0).astype(jnp.uint32)
    return [words for _, words in pack_tile(codes, 1)], [mean_tile(x, tile)]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes a tile."""
    words, (scale,) = leaves
    bits = unpack_tile(words, 1).astype(jnp.int32).astype(jnp.float32)
    return sign_values(bits, scale)
