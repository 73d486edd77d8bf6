"""The microscaling quantizer (OCP MX) as a block op.

Narrow floats share a power of two. All arithmetic is in 32 bits. No narrow
float type appears: backends have no arithmetic for the 4- and 6-bit ones, and
their bits are what is packed.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_layout, _block_op, _checks
from jaxmotion.kernels.pack import _reference as packing

_MAGNITUDE = 0x7FFFFFFF
_NAN_SCALE = 255


class Format(NamedTuple):
  """Bit layout of a narrow float: a sign, an exponent and a mantissa."""

  mantissa: int  # Number of bits of the mantissa.
  bias: int  # Number added to an exponent before it is stored.
  most: int  # Code of the greatest finite magnitude.
  bits: int  # Width of a code.


FORMATS = {
  "float8_e4m3fn": Format(3, 7, 0x7E, 8),
  "float8_e5m2": Format(2, 15, 0x7B, 8),
  "float6_e3m2fn": Format(2, 3, 0x1F, 6),
  "float6_e2m3fn": Format(3, 1, 0x1F, 6),
  "float4_e2m1fn": Format(1, 1, 0x07, 4),
  "float4_e3m0": Format(0, 3, 0x07, 4),
}


class Scaled(NamedTuple):
  """Payload of packed elements and the exponents of their blocks."""

  words: Array  # uint32[rows, columns], codes of the elements, flat and packed.
  # uint8[blocks], s for a scale of 2^(s - 127); 255 for NaN (E8M0).
  scale: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(format=core.choice(FORMATS), block=_checks.check_block)
class MicroscalingOp(_block_op.BlockOp):
  """Narrow floats under a power of two that their block shares.

  Elements are rounded to nearest even and saturate.

  Attributes:
    format: name of the narrow float.
    block: maximum number of elements under one power of two, a contiguous run.
  """

  format: str
  block: int

  @property
  def form(self) -> Format:
    """Bit layout of the narrow float."""
    return FORMATS[self.format]

  @property
  def planes(self) -> int:
    """Number of planes: the codes of a word."""
    return packing.num_planes(self.form.bits)

  def encode(self, x: Array, key: core.Key | None) -> Scaled:
    """Returns codes and one exponent per block."""
    rows = _to_rows(x, self.block)
    # Compared as integers: the exponent is exact, and NaN is above infinity.
    bits = lax.bitcast_convert_type(rows, jnp.uint32)
    peak = jnp.max(bits & jnp.uint32(_MAGNITUDE), axis=1, initial=0)
    scale = _scale_of(peak, self.form)
    codes = _codes_of(rows, scale[:, None], self.form)
    # Not `pack_flat`, which recomputes the codes for each field (6x, 6 bits).
    flat = _block_layout.pad_to_multiple(codes.reshape(-1), self.planes)
    planes = flat.reshape(self.planes, -1)
    words = packing.pack(planes, self.form.bits, follows_blocks=False)
    return Scaled(words, scale.astype(jnp.uint8))

  def decode(self, payload: Scaled, like: ShapedLike) -> Array:
    """Returns the values of the codes under their exponents."""
    size = math.prod(like.shape)
    blocks = payload.scale.shape[0]
    width = _block_width(size, self.block)
    codes = packing.unpack_flat(payload.words, self.form.bits, blocks * width)
    scale = payload.scale.astype(jnp.int32)[:, None]
    flat = _values_of(codes.reshape(blocks, width), scale, self.form)
    flat = flat.reshape(-1)
    flat = flat if flat.size == size else flat[:size]
    return core.saturate_cast(flat.reshape(like.shape), like.dtype)

  def layout(self, shape: tuple[int, ...]) -> _block_op.BlockLayout:
    """Returns blocks that no plane divides in two."""
    size = math.prod(shape)
    blocks = max(1, size // (self.planes * self.block))
    layout = _block_op.BlockLayout(self.planes, blocks, self.block, size)
    _block_op.reject_padding(layout)
    return layout

  def leaf_layouts(self) -> tuple[_block_op.LeafLayout, ...]:
    """Returns the layouts of words and exponents."""
    return _block_op.list_leaves(
      packing.word_rows(self.form.bits), self.planes, 1
    )

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    peak = lax.bitcast_convert_type(_block_op.tile_peak(x), jnp.uint32)
    scale = _scale_of(peak, self.form)
    codes = _codes_of(x, scale, self.form)
    words = packing.pack_tile(codes, self.form.bits)
    return words, [scale.astype(jnp.uint8)]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    words, (scale,) = leaves
    codes = packing.unpack_tile(words, self.form.bits)
    return _values_of(codes, scale.astype(jnp.int32), self.form)


def _scale_of(peak: Array, form: Format) -> Array:
  """Returns the exponents, int32, of blocks from the bits of their peaks."""
  exponent = (peak >> 23).astype(jnp.int32)
  if not form.mantissa:
    # The greatest value is that of a binade alone: the nearest to the peak.
    nearest = ((peak + jnp.uint32(1 << 22)) >> 23).astype(jnp.int32)
    exponent = jnp.where(exponent < 254, nearest, exponent)
  emax = (form.most >> form.mantissa) - form.bias
  scale = jnp.maximum(exponent - emax, 0)
  return jnp.where(exponent == 255, _NAN_SCALE, scale)


def _codes_of(x: Array, scale: Array, form: Format) -> Array:
  """Returns the codes, uint32, of elements under int32 exponents."""
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  # 2^(127 - s), normal for every s but that of NaN.
  inverse = _power_of_two(254 - jnp.minimum(scale, 254))
  magnitude = bits & jnp.uint32(_MAGNITUDE)
  v = lax.bitcast_convert_type(magnitude, jnp.float32) * inverse
  # Signed, for a TPU's compiler has no minimum of unsigned integers.
  codes = jnp.minimum(round_codes(v, form).astype(jnp.int32), form.most)
  return codes.astype(jnp.uint32) | ((bits >> 31) << (form.bits - 1))


def _values_of(codes: Array, scale: Array, form: Format) -> Array:
  """Returns the values, float32, of codes under int32 exponents."""
  # Twice the scale: 2^-127 itself is no normal number.
  double = jnp.where(scale == _NAN_SCALE, jnp.nan, _power_of_two(scale + 1))
  return _half_values(codes, form) * double


def _block_width(size: int, block: int) -> int:
  return max(1, min(size, block))


def _to_rows(x: Array, block: int) -> Array:
  """Returns f32[blocks, width], with zeros filling the last block."""
  width = _block_width(x.size, block)
  flat = x.reshape(-1).astype(jnp.float32)
  return _block_layout.pad_to_multiple(flat, width).reshape(-1, width)


def round_codes(v: Array, form: Format) -> Array:
  """Returns the codes, not saturated, of magnitudes >= 0."""
  bits = lax.bitcast_convert_type(v, jnp.uint32)
  drop = 23 - form.mantissa
  even = (bits >> drop) & 1
  normal = (bits + jnp.uint32(2 ** (drop - 1) - 1) + even) >> drop
  normal = normal - jnp.uint32((127 - form.bias) << form.mantissa)
  # Below the least normal the steps are even: adding the number whose last
  # place is one step rounds to it.
  least = 2.0 ** (1 - form.bias)
  magic = np.float32(least * 2.0**drop)
  subnormal = lax.bitcast_convert_type(v + magic, jnp.uint32)
  subnormal = subnormal - magic.view(np.uint32)
  return jnp.where(v < least, subnormal, normal)


def _half_values(codes: Array, form: Format) -> Array:
  """Returns half of the value that each code stands for."""
  magnitude = codes & jnp.uint32(2 ** (form.bits - 1) - 1)
  sign = (codes >> (form.bits - 1)) << 31
  normal = magnitude << (23 - form.mantissa)
  normal = normal + jnp.uint32((126 - form.bias) << 23)
  step = 2.0 ** (-form.bias - form.mantissa)
  subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * step
  bits = jnp.where(
    magnitude < 2**form.mantissa,
    lax.bitcast_convert_type(subnormal, jnp.uint32),
    normal,
  )
  return lax.bitcast_convert_type(bits | sign, jnp.float32)


def _power_of_two(exponent: Array) -> Array:
  """Returns 2^(exponent - 127) for 0 <= exponent <= 254; 0 stands for 0."""
  bits = exponent.astype(jnp.uint32) << 23
  return lax.bitcast_convert_type(bits, jnp.float32)
