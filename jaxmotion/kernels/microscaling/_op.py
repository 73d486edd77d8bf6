"""Microscaling as a pass over blocks."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, ShapedLike
from jaxmotion.kernels._block_op import (
  BlockOp,
  Cut,
  Leaf,
  Tile,
  peak_tile,
  refuse_padding,
)
from jaxmotion.kernels.microscaling._reference import (
  FORMATS,
  Format,
  Scaled,
  mx_codes,
  mx_decode,
  mx_encode,
  mx_scale,
  mx_values,
)
from jaxmotion.kernels.pack import (
  num_planes,
  pack_tile,
  piece_rows,
  unpack_tile,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroscalingOp(BlockOp):
  """Narrow floats under a shared power of two.

  Attributes:
    format: name of the narrow float.
    block: the most values under one power of two.
  """

  format: str
  block: int

  @property
  def form(self) -> Format:
    """The narrow float."""
    return FORMATS[self.format]

  @property
  def planes(self) -> int:
    """Codes of one word."""
    return num_planes(self.form.bits)

  def encode(self, x: Array, key: Key | None) -> Scaled:
    """Returns codes and an exponent a block."""
    return mx_encode(x, self.form, self.block)

  def decode(self, payload: Scaled, like: ShapedLike) -> Array:
    """Returns the codes under their exponents."""
    return mx_decode(payload, like, self.form, self.block)

  def cut(self, shape: tuple[int, ...]) -> Cut:
    """Blocks that no plane cuts in two."""
    size = math.prod(shape)
    blocks = max(1, size // (self.planes * self.block))
    cut = Cut(self.planes, blocks, self.block, size)
    refuse_padding(cut)
    return cut

  def leaves(self) -> tuple[Leaf, ...]:
    """Words and exponents."""
    words = Leaf(tuple(piece_rows(self.form.bits)), True)
    return words, Leaf(((0, self.planes),), False)

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes a tile."""
    peak = lax.bitcast_convert_type(peak_tile(x), jnp.uint32)
    scale = mx_scale(peak, self.form)
    codes = mx_codes(x, scale, self.form)
    words = [w for _, w in pack_tile(codes, self.form.bits)]
    return words, [scale.astype(jnp.uint8)]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes a tile."""
    words, (scale,) = leaves
    codes = unpack_tile(words, self.form.bits)
    return mx_values(codes, scale.astype(jnp.int32), self.form)
