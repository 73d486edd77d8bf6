"""The microscaling quantizer as a block op."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, ShapedLike, check_choice
from jaxmotion.kernels._block_op import (
  BlockLayout,
  BlockOp,
  LeafLayout,
  Tile,
  reject_padding,
  tile_peak,
)
from jaxmotion.kernels._checks import check_block
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
  """Narrow floats under a power of two that their block shares.

  Attributes:
    format: name of the narrow float.
    block: maximum number of elements under one power of two.
  """

  format: str
  block: int

  def __post_init__(self) -> None:
    check_choice("format", self.format, FORMATS)
    check_block(self.block)

  @property
  def form(self) -> Format:
    """Bit layout of the narrow float."""
    return FORMATS[self.format]

  @property
  def planes(self) -> int:
    """Number of planes: the codes of a word."""
    return num_planes(self.form.bits)

  def encode(self, x: Array, key: Key | None) -> Scaled:
    """Returns codes and one exponent per block."""
    return mx_encode(x, self.form, self.block)

  def decode(self, payload: Scaled, like: ShapedLike) -> Array:
    """Returns the values of the codes under their exponents."""
    return mx_decode(payload, like, self.form, self.block)

  def layout(self, shape: tuple[int, ...]) -> BlockLayout:
    """Returns blocks that no plane divides in two."""
    size = math.prod(shape)
    blocks = max(1, size // (self.planes * self.block))
    layout = BlockLayout(self.planes, blocks, self.block, size)
    reject_padding(layout)
    return layout

  def leaf_layouts(self) -> tuple[LeafLayout, ...]:
    """Returns the layouts of words and exponents."""
    words = LeafLayout(tuple(piece_rows(self.form.bits)), True)
    return words, LeafLayout(((0, self.planes),), False)

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    peak = lax.bitcast_convert_type(tile_peak(x), jnp.uint32)
    scale = mx_scale(peak, self.form)
    codes = mx_codes(x, scale, self.form)
    words = [w for _, w in pack_tile(codes, self.form.bits)]
    return words, [scale.astype(jnp.uint8)]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    codes = unpack_tile(words, self.form.bits)
    return mx_values(codes, scale.astype(jnp.int32), self.form)
