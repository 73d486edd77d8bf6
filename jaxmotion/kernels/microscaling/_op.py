"""The microscaling quantizer as a block op."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_op, _checks, pack
from jaxmotion.kernels.microscaling import _reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroscalingOp(_block_op.BlockOp):
  """Narrow floats under a power of two that their block shares.

  Attributes:
    format: name of the narrow float.
    block: maximum number of elements under one power of two.
  """

  format: str
  block: int

  def __post_init__(self) -> None:
    core.check_choice("format", self.format, _reference.FORMATS)
    _checks.check_block(self.block)

  @property
  def form(self) -> _reference.Format:
    """Bit layout of the narrow float."""
    return _reference.FORMATS[self.format]

  @property
  def planes(self) -> int:
    """Number of planes: the codes of a word."""
    return pack.num_planes(self.form.bits)

  def encode(self, x: Array, key: core.Key | None) -> _reference.Scaled:
    """Returns codes and one exponent per block."""
    return _reference.mx_encode(x, self.form, self.block)

  def decode(self, payload: _reference.Scaled, like: ShapedLike) -> Array:
    """Returns the values of the codes under their exponents."""
    return _reference.mx_decode(payload, like, self.form, self.block)

  def layout(self, shape: tuple[int, ...]) -> _block_op.BlockLayout:
    """Returns blocks that no plane divides in two."""
    size = math.prod(shape)
    blocks = max(1, size // (self.planes * self.block))
    layout = _block_op.BlockLayout(self.planes, blocks, self.block, size)
    _block_op.reject_padding(layout)
    return layout

  def leaf_layouts(self) -> tuple[_block_op.LeafLayout, ...]:
    """Returns the layouts of words and exponents."""
    words = _block_op.LeafLayout(tuple(pack.piece_rows(self.form.bits)), True)
    return words, _block_op.LeafLayout(((0, self.planes),), False)

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    peak = lax.bitcast_convert_type(_block_op.tile_peak(x), jnp.uint32)
    scale = _reference.mx_scale(peak, self.form)
    codes = _reference.mx_codes(x, scale, self.form)
    words = [w for _, w in pack.pack_tile(codes, self.form.bits)]
    return words, [scale.astype(jnp.uint8)]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    codes = pack.unpack_tile(words, self.form.bits)
    return _reference.mx_values(codes, scale.astype(jnp.int32), self.form)
