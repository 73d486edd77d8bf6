"""The sign quantizer as a block op."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_layout, _block_op, _checks
from jaxmotion.kernels.pack import _reference as packing

_PLANES = 32


class Signs(NamedTuple):
  """Payload of packed signs and mean magnitudes."""

  words: Array  # uint32[1, blocks, width], bit i of a word from plane i.
  scale: Array  # float32[32, blocks], the mean magnitude; [1, 1] for one block.


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(block=_checks.check_block)
class SignOp(_block_op.ScaledOp):
  """One bit per element, under the mean magnitude of its block.

  Attributes:
    block: maximum number of elements under one scale.
  """

  block: int

  @property
  def planes(self) -> int:
    """Number of planes: the bits of a word."""
    return _PLANES

  @property
  def needs_full_blocks(self) -> bool:
    """Whether padding would change the scale of its block: it would."""
    return True

  def encode(self, x: Array, key: core.Key | None) -> Signs:
    """Returns signs (zero counts as positive) and one scale per block."""
    cut = _PLANES, self.block
    total = _block_layout.reduce_blocks(
      x, *cut, _block_layout.sum_magnitudes, past_end=0.0
    )
    scale = total / _block_layout.block_counts(x.shape, *cut).clip(1)
    codes = [
      (s, (b < 0).astype(jnp.uint32))
      for s, b in _block_layout.cut_planes(x, *cut)
    ]
    return Signs(packing.pack_cut(codes, 1), scale[..., 0])

  def decode(self, payload: Signs, like: ShapedLike) -> Array:
    """Returns plus or minus the scale of the block."""
    bits = packing.unpack_to_float(payload.words, 1)
    y = _select_sign(bits, payload.scale[..., None])
    return _block_layout.from_blocks(y, like)

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    codes = (x < 0).astype(jnp.uint32)
    return packing.pack_tile(codes, 1), [_block_op.tile_mean(x, tile)]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    return _select_sign(packing.unpack_tile_to_float(words, 1), scale)


def _select_sign(bits: Array, scale: Array) -> Array:
  """Returns scale for a bit of 0 and -scale for 1, float32."""
  return (1.0 - 2.0 * bits) * scale
