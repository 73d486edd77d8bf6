"""The ternary quantizer as a block op."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_op, _checks, _words
from jaxmotion.kernels.ternary import _reference

_PLANES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TernaryOp(_block_op.BlockOp):
  """Minus, zero or plus the scale of the block, for each element.

  Attributes:
    block: maximum number of elements under one scale.
    stochastic: whether rounding is random; otherwise it is by threshold.
  """

  block: int
  stochastic: bool = True

  def __post_init__(self) -> None:
    _checks.check_block(self.block)
    core.check_bool("stochastic", self.stochastic)

  @property
  def planes(self) -> int:
    """Number of planes: the trits of a word."""
    return _PLANES

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.stochastic

  def encode(self, x: Array, key: core.Key | None) -> _reference.Trits:
    """Returns trits and one scale per block."""
    return _reference.ternary_encode(
      x, self.block, key if self.stochastic else None
    )

  def decode(self, payload: _reference.Trits, like: ShapedLike) -> Array:
    """Returns minus, zero or plus the scale of the block."""
    return _reference.ternary_decode(payload, like)

  def layout(self, shape: tuple[int, ...]) -> _block_op.BlockLayout:
    """Returns blocks; by threshold full ones, since padding counts in means."""
    full = not self.stochastic
    return _block_op.layout_blocks(shape, _PLANES, self.block, full=full)

  def decoded_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the planes, the blocks of a plane and their width."""
    return _block_op.block_shape(shape, _PLANES, self.block)

  def leaf_layouts(self) -> tuple[_block_op.LeafLayout, ...]:
    """Returns the layouts of words and scales."""
    return _block_op.LeafLayout(((0, 1),), True), _block_op.LeafLayout(
      ((0, _PLANES),), False
    )

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    if seed is None:
      mean = _block_op.tile_mean(x, tile)
      bound, scale = _reference.threshold_bound(x, mean, _sum_magnitudes)
    else:
      words = core.random_words_at(seed, tile.position)
      bound, scale = _reference.stochastic_bound(_block_op.tile_peak(x), words)
    codes = _reference.ternary_codes(x, bound)
    weights = _plane_powers(codes, last=True)
    return [
      _reference.to_fraction(_words.sum_words(codes * weights, axis=0))
    ], [scale]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    (words,), (scale,) = leaves
    spread = jnp.broadcast_to(words, tile.position.shape)
    codes = _reference.leading_trit(spread * _plane_powers(spread, last=False))
    return _reference.ternary_signs(codes) * scale


def _sum_magnitudes(x: Array) -> Array:
  return jnp.sum(jnp.abs(x), axis=2, keepdims=True)


def _plane_powers(codes: Array, *, last: bool) -> Array:
  """Returns powers of three, [planes, 1, 1], rising or falling to 1."""
  # Planes beyond the twenty get 0. The powers are chosen one by one because a
  # kernel has no tables.
  plane = lax.broadcasted_iota(jnp.int32, (codes.shape[0], 1, 1), 0)
  power = jnp.zeros_like(plane, jnp.uint32)
  for i in range(_PLANES):
    exponent = _PLANES - 1 - i if last else i
    power = jnp.where(plane == i, jnp.uint32(3**exponent), power)
  return power
