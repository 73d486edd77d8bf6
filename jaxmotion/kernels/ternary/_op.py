"""The ternary quantizer as a block op: three levels, 20 trits per word.

Twenty trits make a number v < 3^20 < 2^32. A word holds its binary fraction,
w = v 2^32 / 3^20 rounded up, instead of v. The trits are then the digits of
w / 2^32 in base 3. Each takes two comparisons after one wrapping
multiplication. Reading them from v would need divisions, which hosts do not do
in vectors.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_layout, _block_op, _checks
from jaxmotion.kernels.pack import _reference as packing

_PLANES = 20
_POWERS = 3 ** np.arange(_PLANES, dtype=np.uint32)
# 2^32 / 3^20 - 1 in units of 2^-34, rounded up: what `_to_fraction` adds to v.
_EXCESS = -(-(2**66) // 3**_PLANES) - 2**34
# Least words whose leading trit is 1 and 2.
_ONE, _TWO = -(-(2**32) // 3), -(-(2**33) // 3)
# A scale below this has no finite reciprocal and its fractions flush to zero.
_TINY = 2.0**-126


class Trits(NamedTuple):
  """Payload of packed codes -1, 0 and 1 and their magnitude."""

  # uint32[1, blocks, width], a trit of a word from each of 20 planes.
  words: Array
  scale: Array  # float32[20, blocks]; [1, 1] for an array of one block.


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(block=_checks.check_block, stochastic=core.boolean)
class TernaryOp(_block_op.ScaledOp):
  """Minus, zero or plus the scale of the block, for each element.

  Rounding by threshold keeps the magnitudes above 0.7 of their mean, and the
  scale is the mean of those. Random rounding is under the greatest magnitude.

  Attributes:
    block: maximum number of elements under one scale.
    stochastic: whether rounding is random; otherwise it is by threshold.
  """

  block: int
  stochastic: bool = True

  @property
  def planes(self) -> int:
    """Number of planes: the trits of a word."""
    return _PLANES

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.stochastic

  @property
  def needs_full_blocks(self) -> bool:
    """Whether padding would change the scale of its block: a mean, it would."""
    return not self.stochastic

  def encode(self, x: Array, key: core.Key | None) -> Trits:
    """Returns trits and one scale per block."""
    b = _block_layout.to_blocks(x, _PLANES, self.block)
    if key is None or not self.stochastic:
      bound, scale = _bound_blocks(b, x.shape, self.block)
    else:
      peak = _block_layout.reduce_blocks(
        x, _PLANES, self.block, _block_layout.max_magnitude
      )
      bound, scale = _draw_bound(peak, core.random_words(key.worker, b.shape))
    return Trits(pack_trits(_round_to_codes(b, bound)), scale[..., 0])

  def decode(self, payload: Trits, like: ShapedLike) -> Array:
    """Returns minus, zero or plus the scale of the block."""
    signs = _signs_of(unpack_trits(payload.words))
    return _block_layout.from_blocks(signs * payload.scale[..., None], like)

  def encode_tile(
    self, x: Array, tile: _block_op.Tile, seed: Array | None
  ) -> tuple[list[Array], ...]:
    """Encodes one tile to the pieces of each leaf."""
    if seed is None:
      add_up = lambda y: jnp.sum(jnp.abs(y), axis=2, keepdims=True)
      mean = _block_op.tile_mean(x, tile)
      bound, scale = _bound_by_mean(x, mean, add_up)
    else:
      words = core.random_words_at(seed, tile.position)
      bound, scale = _draw_bound(_block_op.tile_peak(x), words)
    codes = _round_to_codes(x, bound)
    total = packing.sum_words(codes * _tile_powers(codes, last=True))
    return [_to_fraction(total)], [scale]

  def decode_tile(
    self, leaves: tuple[list[Array], ...], tile: _block_op.Tile
  ) -> Array:
    """Decodes the pieces of one tile."""
    (words,), (scale,) = leaves
    spread = jnp.broadcast_to(words, tile.position.shape)
    codes = _leading_trit(spread * _tile_powers(spread, last=False))
    return _signs_of(codes) * scale


def pack_trits(codes: Array) -> Array:
  """Packs uint32[20, ...] codes 0, 1, 2 into uint32[1, ...] words.

  >>> codes = jnp.arange(40, dtype=jnp.uint32).reshape(20, 2) % 3
  >>> bool((unpack_trits(pack_trits(codes)) == codes).all())
  True
  """
  terms = codes * _plane_powers(codes)[::-1]
  return _to_fraction(packing.sum_planes(terms))[None]


def unpack_trits(words: Array) -> Array:
  """Inverts `pack_trits`: words to uint32[20, ...] codes 0, 1, 2."""
  spread = jnp.broadcast_to(words, (_PLANES, *words.shape[1:]))
  return _leading_trit(spread * _plane_powers(spread))


def _to_fraction(number: Array) -> Array:
  """Returns the word of a number of 20 trits: its binary fraction."""
  excess = packing.mul_high(number, jnp.uint32(_EXCESS)) >> 2
  # The result is at most 1.21 above the exact product. The word of the next
  # number is 2^32 / 3^20 > 1.23 above it, so the trits are unambiguous.
  return number + excess + 1


def _leading_trit(rest: Array) -> Array:
  """Returns the first trit of binary fractions, uint32."""
  one, two = rest >= jnp.uint32(_ONE), rest >= jnp.uint32(_TWO)
  return one.astype(jnp.uint32) + two.astype(jnp.uint32)


def _round_to_codes(x: Array, bound: Array) -> Array:
  """Returns codes, uint32: 0 below -bound, 2 above bound, 1 between."""
  positive, negative = x > bound, x < -bound
  return 1 + positive.astype(jnp.uint32) - negative.astype(jnp.uint32)


def _signs_of(codes: Array) -> Array:
  """Returns -1, 0 or 1 for each code, float32."""
  return codes.astype(jnp.int32).astype(jnp.float32) - 1.0


def _draw_bound(peak: Array, words: Array) -> tuple[Array, Array]:
  """Returns random magnitudes below which elements become 0, and the scale."""
  scale = jnp.where(peak < _TINY, 0.0, peak)
  scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
  # Through int32: not every backend converts uint32 in vectors.
  fraction = (words >> 8).astype(jnp.int32).astype(jnp.float32)
  return fraction * (scale * jnp.float32(2.0**-24)), scale


def _bound_blocks(
  b: Array, shape: tuple[int, ...], block: int
) -> tuple[Array, Array]:
  """Returns the threshold and the scale of each block, without padding."""
  size = math.prod(shape)
  axes = _block_layout.scale_axes(size, block)
  if b.size != size:
    index = lax.iota(jnp.int32, b.size).reshape(b.shape)
    b = jnp.where(index < size, b, 0.0)
  counts = _block_layout.block_counts(shape, _PLANES, block).clip(1)
  mean = _block_layout.sum_magnitudes(b, axes) / counts
  return _bound_by_mean(
    b, mean, lambda y: _block_layout.sum_magnitudes(y, axes)
  )


def _bound_by_mean(
  b: Array, mean: Array, total: Callable[[Array], Array]
) -> tuple[Array, Array]:
  """Returns 0.7 of the mean |b|, and the mean of the magnitudes above."""
  bound = 0.7 * mean
  above = jnp.abs(b) > bound
  taken = total(jnp.where(above, b, 0.0))
  number = total(above.astype(jnp.float32))
  scale = taken / jnp.maximum(number, 1.0)
  return bound, jnp.where(jnp.isfinite(mean), scale, jnp.nan)


def _plane_powers(codes: Array) -> Array:
  shape = (_PLANES,) + (1,) * (codes.ndim - 1)
  return jnp.asarray(_POWERS).reshape(shape)


def _tile_powers(codes: Array, *, last: bool) -> Array:
  """Returns powers of three, [planes, 1, 1], rising or falling to 1."""
  # Planes beyond the twenty get 0. The powers are chosen one by one because a
  # kernel has no tables.
  plane = lax.broadcasted_iota(jnp.int32, (codes.shape[0], 1, 1), 0)
  power = jnp.zeros_like(plane, jnp.uint32)
  for i in range(_PLANES):
    exponent = _PLANES - 1 - i if last else i
    power = jnp.where(plane == i, jnp.uint32(3**exponent), power)
  return power
