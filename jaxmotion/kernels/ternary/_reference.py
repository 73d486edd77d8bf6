"""Ternary quantization: three levels per element, 20 trits per word.

Twenty trits make a number v < 3^20 < 2^32. A word holds its binary fraction,
w = v 2^32 / 3^20 rounded up, instead of v. The trits are then the digits of
w / 2^32 in base 3. Each takes two comparisons after one wrapping
multiplication. Reading them from v would need divisions, which hosts do not do
in vectors.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_op, _words
from jaxmotion.kernels.pack import _reference

_TRITS = 20
_POWERS = 3 ** np.arange(_TRITS, dtype=np.uint32)
# 2^32 / 3^20 - 1 in units of 2^-34, rounded up: what `to_fraction` adds to v.
_EXCESS = -(-(2**66) // 3**_TRITS) - 2**34
# Least words whose leading trit is 1 and 2.
_ONE, _TWO = -(-(2**32) // 3), -(-(2**33) // 3)
# A scale below this has no finite reciprocal and its fractions flush to zero.
_TINY = 2.0**-126


class Trits(NamedTuple):
  """Payload of packed codes -1, 0 and 1 and their magnitude.

  Attributes:
    words: uint32[1, blocks * width], a trit of a word from each of 20 planes.
    scale: float32[20, blocks]; [1, 1] for an array of one block.
  """

  words: Array
  scale: Array


def pack_trits(codes: Array) -> Array:
  """Packs uint32[20, ...] codes 0, 1, 2 into uint32[1, ...] words.

  >>> codes = jnp.arange(40, dtype=jnp.uint32).reshape(20, 2) % 3
  >>> bool((unpack_trits(pack_trits(codes)) == codes).all())
  True
  """
  return to_fraction(_reference.sum_planes(codes * _plane_powers(codes)[::-1]))[
    None
  ]


def to_fraction(number: Array) -> Array:
  """Returns the word of a number of 20 trits: its binary fraction."""
  excess = _words.mul_high(number, jnp.uint32(_EXCESS)) >> 2
  # The result is at most 1.21 above the exact product. The word of the next
  # number is 2^32 / 3^20 > 1.23 above it, so the trits are unambiguous.
  return number + excess + 1


def leading_trit(rest: Array) -> Array:
  """Returns the first trit of binary fractions, uint32."""
  one, two = rest >= jnp.uint32(_ONE), rest >= jnp.uint32(_TWO)
  return one.astype(jnp.uint32) + two.astype(jnp.uint32)


def unpack_trits(words: Array) -> Array:
  """Inverts `pack_trits`: words to uint32[20, ...] codes 0, 1, 2."""
  spread = jnp.broadcast_to(words, (_TRITS, *words.shape[1:]))
  return leading_trit(spread * _plane_powers(spread))


def ternary_encode(x: Array, block: int, key: core.Key | None) -> Trits:
  """Rounds each element to -s, 0 or s, with one s per block.

  Args:
    x: floating array of any shape.
    block: maximum number of elements under one scale.
    key: rounds stochastically by `key.worker` under the greatest magnitude;
      None keeps the magnitudes above 0.7 of the mean, and s is their mean.
  """
  b = _block_op.to_blocks(x, _TRITS, block)
  if key is None:
    bound, scale = _bound_threshold(b, x.shape, block)
  else:
    peak = _block_op.reduce_blocks(x, _TRITS, block, _block_op.max_magnitude)
    bound, scale = stochastic_bound(
      peak, core.random_words(key.worker, b.shape)
    )
  return Trits(pack_trits(ternary_codes(b, bound)), scale[..., 0])


def ternary_codes(x: Array, bound: Array) -> Array:
  """Returns codes, uint32: 0 below -bound, 2 above bound, 1 between."""
  positive, negative = x > bound, x < -bound
  return 1 + positive.astype(jnp.uint32) - negative.astype(jnp.uint32)


def ternary_signs(codes: Array) -> Array:
  """Returns -1, 0 or 1 for each code, float32."""
  return codes.astype(jnp.int32).astype(jnp.float32) - 1.0


def ternary_decode(payload: Trits, like: ShapedLike) -> Array:
  """Returns -s, 0 or s for each element."""
  codes = unpack_trits(payload.words)
  return _block_op.from_blocks(
    ternary_signs(codes) * payload.scale[..., None], like
  )


def stochastic_bound(peak: Array, words: Array) -> tuple[Array, Array]:
  """Returns random magnitudes below which elements become 0, and the scale."""
  scale = _finite_or_nan(jnp.where(peak < _TINY, 0.0, peak))
  # Through int32: not every backend converts uint32 in vectors.
  fraction = (words >> 8).astype(jnp.int32).astype(jnp.float32)
  return fraction * (scale * jnp.float32(2.0**-24)), scale


def _bound_threshold(
  b: Array, shape: tuple[int, ...], block: int
) -> tuple[Array, Array]:
  """Returns the magnitude up to which elements become 0, and the scale."""
  size = math.prod(shape)
  axes = _block_op.scale_axes(size, block)
  if b.size != size:
    index = lax.iota(jnp.int32, b.size).reshape(b.shape)
    b = jnp.where(index < size, b, 0.0)
  counts = _block_op.block_counts(shape, _TRITS, block).clip(1)
  mean = _block_op.sum_magnitudes(b, axes) / counts
  return threshold_bound(b, mean, lambda y: _block_op.sum_magnitudes(y, axes))


def threshold_bound(
  b: Array, mean: Array, total: Callable[[Array], Array]
) -> tuple[Array, Array]:
  """Returns the magnitude up to which elements become 0, and the scale."""
  bound = 0.7 * mean
  above = jnp.abs(b) > bound
  taken = total(jnp.where(above, b, 0.0))
  number = total(above.astype(jnp.float32))
  scale = taken / jnp.maximum(number, 1.0)
  return bound, jnp.where(jnp.isfinite(mean), scale, jnp.nan)


def _finite_or_nan(scale: Array) -> Array:
  return jnp.where(jnp.isfinite(scale), scale, jnp.nan)


def _plane_powers(codes: Array) -> Array:
  shape = (_TRITS,) + (1,) * (codes.ndim - 1)
  return jnp.asarray(_POWERS.astype(np.uint32)).reshape(shape)
