"""Three levels as a pass over blocks."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, ShapedLike, random_words_at
from jaxmotion.kernels._block_op import (
  BlockOp,
  Cut,
  Leaf,
  Tile,
  cut_blocks,
  mean_tile,
  peak_tile,
)
from jaxmotion.kernels.ternary._reference import (
  Trits,
  leading_trit,
  stochastic_bound,
  ternary_codes,
  ternary_decode,
  ternary_encode,
  ternary_signs,
  threshold_bound,
  to_fraction,
)

_PLANES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TernaryOp(BlockOp):
  """Minus, zero or plus each block's magnitude.

  Attributes:
    block: the most values under one scale.
    stochastic: rounding; else by threshold.
  """

  block: int
  stochastic: bool = True

  @property
  def planes(self) -> int:
    """Trits of one word."""
    return _PLANES

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.stochastic

  def encode(self, x: Array, key: Key | None) -> Trits:
    """Returns trits and a scale a block."""
    return ternary_encode(x, self.block, key if self.stochastic else None)

  def decode(self, payload: Trits, like: ShapedLike) -> Array:
    """Returns minus, zero or plus the scale."""
    return ternary_decode(payload, like)

  def cut(self, shape: tuple[int, ...]) -> Cut:
    """Blocks; full ones by threshold, for padding would count in means."""
    whole = not self.stochastic
    return cut_blocks(shape, _PLANES, self.block, whole=whole)

  def leaves(self) -> tuple[Leaf, ...]:
    """Words and scales."""
    return Leaf(((0, 1),), True), Leaf(((0, _PLANES),), False)

  def encode_tile(
    self, x: Array, tile: Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes a tile."""
    if seed is None:
      mean = mean_tile(x, tile)
      bound, scale = threshold_bound(x, mean, _total)
    else:
      words = random_words_at(seed, tile.position)
      bound, scale = stochastic_bound(peak_tile(x), words)
    codes = ternary_codes(x, bound)
    weights = _powers(codes, last=True)
    number = jnp.sum(codes * weights, axis=0, keepdims=True, dtype=jnp.uint32)
    return [to_fraction(number)], [scale]

  def decode_tile(self, leaves: tuple[list[Array], ...], tile: Tile) -> Array:
    """Decodes a tile."""
    (words,), (scale,) = leaves
    spread = jnp.broadcast_to(words, tile.position.shape)
    codes = leading_trit(spread * _powers(spread, last=False))
    return ternary_signs(codes) * scale


def _total(x: Array) -> Array:
  return jnp.sum(jnp.abs(x), axis=2, keepdims=True)


def _powers(codes: Array, *, last: bool) -> Array:
  """Powers of three, [planes, 1, 1]: growing, or falling to 1 at the last.

  0 for planes beyond the twenty. Chosen one by one: a kernel has no tables.
  """
  plane = lax.broadcasted_iota(jnp.int32, (codes.shape[0], 1, 1), 0)
  power = jnp.zeros_like(plane, jnp.uint32)
  for i in range(_PLANES):
    exponent = _PLANES - 1 - i if last else i
    power = jnp.where(plane == i, jnp.uint32(3**exponent), power)
  return power
