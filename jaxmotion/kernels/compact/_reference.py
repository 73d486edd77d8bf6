"""Compaction: the marked entries of an array, packed in order.

Marks are a bitmap, bit i of word g for entry 32 g + i. Where an entry goes is
the number of marks before it: of whole words, from sums over words in a tree
of 32 children a node, and within its word a population count. On the host that
is 6x as fast as a running sum over entries.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion.core import Array

_FAN = 32
# From one slot in this many entries on, compaction beats a search a slot.
_SPARSE = 64
_LANES = np.arange(_FAN, dtype=np.uint32)


def mark(keep: Array) -> Array:
  """Packs bool[n] marks into uint32[ceil(n / 32)] words.

  >>> mark(jnp.array([True, False, True])).tolist()
  [5]
  """
  padding = -keep.size % _FAN
  keep = jnp.pad(keep, (0, padding)) if padding else keep
  bits = keep.reshape(-1, _FAN).astype(jnp.uint32) << jnp.asarray(_LANES)[None]
  return jnp.sum(bits, axis=1, dtype=jnp.uint32)


def starts(bitmap: Array) -> Array:
  """Returns the marks before each word and, last, all marks.

  Args:
    bitmap: uint32[words] from `mark`.

  Returns:
    int32[words + 1].

  >>> starts(jnp.array([5, 0, 1], jnp.uint32)).tolist()
  [0, 2, 2, 3]
  """
  if not bitmap.size:
    return jnp.zeros(1, jnp.int32)
  before = _tree(bitmap)[-1][: bitmap.size]
  total = before[-1:] + lax.population_count(bitmap[-1:]).astype(jnp.int32)
  return jnp.concatenate([before, total])


def compact(values: Array, bitmap: Array, start: Array, capacity: int) -> Array:
  """Packs the marked values in order; those beyond `capacity` are dropped.

  Args:
    values: array[n].
    bitmap: uint32[ceil(n / 32)] from `mark`.
    start: int32 from `starts`.
    capacity: static length of the result.

  Returns:
    array[capacity], zeros after the last marked value.

  >>> x = jnp.array([0.0, 3.0, 0.0, 4.0])
  >>> bitmap = mark(x != 0)
  >>> compact(x, bitmap, starts(bitmap), 3).tolist()
  [3.0, 4.0, 0.0]
  """
  marked, before = _ranks(bitmap, start, values.size)
  # What is not kept goes to one slot more, which is cut off: dropping indices
  # that are out of bounds costs 4x.
  slot = jnp.where(marked, jnp.minimum(before, capacity), capacity)
  out = jnp.zeros(capacity + 1, values.dtype)
  return out.at[slot].set(values, mode="promise_in_bounds")[:capacity]


def expand(values: Array, bitmap: Array, start: Array, size: int) -> Array:
  """Inverts `compact`: marked entries get values in order, others zero.

  Marked entries beyond the values' number are zero as well.

  Args:
    values: array[capacity].
    bitmap: uint32[ceil(size / 32)].
    start: int32 from `starts`.
    size: of the result.
  """
  zero = jnp.zeros((), values.dtype)
  if not values.size:
    return jnp.broadcast_to(zero, (size,))
  marked, before = _ranks(bitmap, start, size)
  slot = jnp.minimum(before, values.size - 1)
  found = values.at[slot].get(mode="promise_in_bounds")
  return jnp.where(marked & (before < values.size), found, zero)


def select(bitmap: Array, start: Array, capacity: int) -> Array:
  """Returns the positions of the first `capacity` marks, int32[capacity].

  Args:
    bitmap: uint32[words] from `mark`.
    start: int32[words + 1] from `starts`.
    capacity: static length of the result.

  Returns:
    Positions, arbitrary ones after the last mark.

  >>> bitmap = mark(jnp.array([False, True, False, True]))
  >>> select(bitmap, starts(bitmap), 2).tolist()
  [1, 3]
  """
  words = bitmap.size
  if capacity * _SPARSE > words * _FAN:
    entry = lax.iota(jnp.int32, words * _FAN)
    return compact(entry, bitmap, start, capacity)
  slot = lax.iota(jnp.int32, capacity)
  word = jnp.zeros_like(slot)
  for step in reversed(range(max(1, words - 1).bit_length())):
    ahead = jnp.minimum(word + 2**step, words - 1)
    word = jnp.where(_get(start, ahead) <= slot, ahead, word)
  rest = slot - _get(start, word)
  return word * _FAN + _nth_bit(_get(bitmap, word), rest)


def _tree(bitmap: Array) -> list[Array]:
  """Marks before each node, int32, from the root's children to the words."""
  counts = [_rows(lax.population_count(bitmap).astype(jnp.int32))]
  while counts[-1].shape[0] > 1:
    counts.append(_rows(jnp.sum(counts[-1], axis=1, dtype=jnp.int32)))
  earlier = jnp.asarray(np.triu(np.ones((_FAN, _FAN), np.bool_), 1))[None]
  first = jnp.asarray(np.arange(_FAN) == 0)[None, :, None]
  levels: list[Array] = []
  for rows in reversed(counts):
    terms = jnp.where(earlier, rows[:, :, None], 0)
    if levels:
      # Inside the sum, so that it is a running sum over all that is written
      # to memory, and not an addition for whatever reads it to repeat.
      parent = levels[-1][: rows.shape[0], None, None]
      terms = terms + jnp.where(first, parent, 0)
    levels.append(jnp.sum(terms, axis=1, dtype=jnp.int32).reshape(-1))
  return levels


def _rows(counts: Array) -> Array:
  padding = -counts.size % _FAN
  counts = jnp.pad(counts, (0, padding)) if padding else counts
  return counts.reshape(-1, _FAN)


def _ranks(bitmap: Array, start: Array, size: int) -> tuple[Array, Array]:
  """(whether marked, marks before), bool and int32[size]."""
  # Flat, with gathers: XLA:CPU has vectors for these, but not for a result
  # with 32 to a row that is flattened later.
  entry = lax.iota(jnp.int32, size)
  word = _get(bitmap, entry >> 5)
  lane = (entry & (_FAN - 1)).astype(jnp.uint32)
  below = lax.population_count(word & ((jnp.uint32(1) << lane) - 1))
  return (word >> lane) & 1 != 0, _get(start, entry >> 5) + below.astype(
    jnp.int32
  )


def _get(array: Array, index: Array) -> Array:
  return array.at[index].get(mode="promise_in_bounds")


def _nth_bit(word: Array, n: Array) -> Array:
  """The place of the set bit with `n` set bits below it, int32."""
  place = jnp.zeros_like(n)
  for half in (16, 8, 4, 2, 1):
    low = word & jnp.uint32(2**half - 1)
    count = lax.population_count(low).astype(jnp.int32)
    up = n >= count
    n = jnp.where(up, n - count, n)
    word = jnp.where(up, word >> half, low)
    place = jnp.where(up, place + half, place)
  return place
