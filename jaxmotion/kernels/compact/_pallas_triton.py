"""Compaction as Triton kernels: one program per tile, 32 entries per row.

The entries of a tile lie in rows of 32, one row per word of the bitmap. A
program ranks its marks by two running sums, along rows and over rows, so no
value travels between programs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array
from jaxmotion.kernels import _triton
from jaxmotion.kernels.compact import _reference

_FAN = 32
# Words of a bitmap that a program writes, and that a program searches.
_WORDS_MARKED = 64
_WORDS_SEARCHED = 128


def threshold_bitmap(x: Array, *, threshold: float) -> Array:
  """Marks the elements whose magnitude reaches a threshold, with one kernel."""
  words = -(-x.size // _FAN)
  rows = min(_WORDS_MARKED, _triton.power_of_two(words))

  def kernel(x_ref: Any, bitmap_ref: Any) -> None:
    """Writes the bitmap words of one tile of elements."""
    start = _triton.tile_index() * rows
    row, lane = _entry_places(rows)
    index = (start + row) * _FAN + lane
    inside = _triton.inside_limit(index, x.size, rows * _FAN)
    kept = _reference.reaches_threshold(
      _triton.load(x_ref, index, inside), threshold
    )
    if inside is not None:
      kept = kept & inside
    word = start + lax.iota(jnp.int32, rows)
    marks = _pack_rows(kept)
    exists = _triton.inside_limit(word, words, rows)
    _triton.store(bitmap_ref, word, marks, exists)

  return _triton.call_kernel(
    kernel,
    "threshold_bitmap",
    -(-words // rows),
    rows * _FAN,
    [x],
    jax.ShapeDtypeStruct((words,), jnp.uint32),
  )


def bitmap_positions(bitmap: Array, before: Array, *, capacity: int) -> Array:
  """Returns the positions of the first `capacity` marks, with one kernel."""
  # A thread has one word and takes its set bits from the lowest up, one per
  # iteration. The loop runs as often as the fullest word of the program needs.
  size = bitmap.size
  tile = min(_WORDS_SEARCHED, _triton.power_of_two(size))

  def kernel(bitmap_ref: Any, before_ref: Any, position_ref: Any) -> None:
    """Writes the positions of the marks in one tile of bitmap words."""
    index = _triton.tile_index() * tile + lax.iota(jnp.int32, tile)
    inside = _triton.inside_limit(index, size, tile)
    words = _triton.load(bitmap_ref, index, inside)
    first = _triton.load(before_ref, index, inside)
    count = _triton.load(before_ref, index + 1, inside) - first

    def store_lowest(nth: Array, left: Array) -> Array:
      """Stores the place of each word's lowest mark, and clears that mark."""
      slot = first + nth
      _triton.store(
        position_ref,
        slot,
        index * _FAN + _lowest_bit(left),
        (nth < count) & (slot < capacity),
      )
      return left & (left - 1)

    lax.fori_loop(0, jnp.max(count), store_lowest, words)

  return _triton.call_kernel(
    kernel,
    "bitmap_positions",
    -(-size // tile),
    tile * 16,  # one word per thread
    [bitmap, before],
    jax.ShapeDtypeStruct((capacity,), jnp.int32),
  )


def compact_tiles(
  words: Array, *, tile: int, capacity: int
) -> _reference.NonZeros:
  """Packs the first non-zero words of every tile with one kernel."""
  tiles, per_tile = -(-words.size // tile), tile // _FAN
  rows = _triton.power_of_two(per_tile)

  def kernel(x_ref: Any, mask_ref: Any, words_ref: Any, count_ref: Any) -> None:
    """Packs one tile: its mask, its non-zero words and their number."""
    number = _triton.tile_index()
    row, lane = _entry_places(rows)
    index = number * tile + row * _FAN + lane
    inside = _existing(row, per_tile, index, words.size, tile)
    x = _triton.load(x_ref, index, inside)
    kept = x != 0
    slot, count = _rank_marks(kept)
    _triton.store(
      words_ref, number * capacity + slot, x, kept & (slot < capacity)
    )
    empty = lax.iota(jnp.int32, _triton.power_of_two(capacity))
    _triton.store(
      words_ref,
      number * capacity + empty,
      jnp.zeros(empty.shape, x.dtype),
      (empty >= count) & (empty < capacity),
    )
    word = lax.iota(jnp.int32, rows)
    _triton.store(
      mask_ref,
      number * per_tile + word,
      _pack_rows(kept),
      _triton.inside_limit(word, per_tile, rows),
    )
    _triton.store(count_ref, number, count)

  outputs = (
    jax.ShapeDtypeStruct((tiles, per_tile), jnp.uint32),
    jax.ShapeDtypeStruct((tiles, capacity), words.dtype),
    jax.ShapeDtypeStruct((tiles,), jnp.uint32),
  )
  found = _triton.call_kernel(
    kernel, "compact_tiles", tiles, rows * _FAN, [words], outputs
  )
  return _reference.NonZeros(*found)


def expand_tiles(tiles: _reference.NonZeros, *, size: int) -> Array:
  """Puts the packed words of every tile back with one kernel."""
  count, per_tile = tiles.mask.shape
  capacity, tile = tiles.words.shape[1], per_tile * _FAN
  rows = _triton.power_of_two(per_tile)

  def kernel(mask_ref: Any, words_ref: Any, y_ref: Any) -> None:
    """Unpacks one tile: each marked entry loads the word of its rank."""
    number = _triton.tile_index()
    row, lane = _entry_places(rows)
    word = lax.iota(jnp.int32, rows)
    mask = _triton.load(
      mask_ref,
      number * per_tile + word,
      _triton.inside_limit(word, per_tile, rows),
    )
    kept = (mask[:, None] >> lane.astype(jnp.uint32)) & 1 != 0
    slot, _ = _rank_marks(kept)
    held = kept & (slot < capacity)
    y = _triton.load(words_ref, number * capacity + slot, held)
    index = number * tile + row * _FAN + lane
    _triton.store(y_ref, index, y, _existing(row, per_tile, index, size, tile))

  return _triton.call_kernel(
    kernel,
    "expand_tiles",
    count,
    rows * _FAN,
    [tiles.mask, tiles.words],
    jax.ShapeDtypeStruct((size,), tiles.words.dtype),
  )


def _entry_places(rows: int) -> tuple[Array, Array]:
  """Returns (row, bit in the row) of every entry of a tile."""
  row, lane = (
    lax.broadcasted_iota(jnp.int32, (rows, _FAN), axis) for axis in (0, 1)
  )
  return row, lane


def _pack_rows(keep: Array) -> Array:
  """Packs marks bool[rows, 32] into one word per row."""
  bit = lax.broadcasted_iota(jnp.uint32, keep.shape, 1)
  return jnp.sum(keep.astype(jnp.uint32) << bit, axis=1, dtype=jnp.uint32)


def _rank_marks(keep: Array) -> tuple[Array, Array]:
  """Returns (marks before every entry, all marks) of a tile, int32."""
  marks = keep.astype(jnp.int32)
  rows = jnp.sum(marks, axis=1)
  before = jnp.cumsum(rows) - rows
  return before[:, None] + jnp.cumsum(marks, axis=1) - marks, jnp.sum(rows)


def _lowest_bit(word: Array) -> Array:
  """Returns the place of the lowest set bit, int32."""
  # By the exponent of the bit's value as a float: instructions that count bits
  # can be lowered, but do not compile.
  value = (word & (~word + 1)).astype(jnp.float32)
  return (lax.bitcast_convert_type(value, jnp.int32) >> 23) - 127


def _existing(
  row: Array, per_tile: int, index: Array, size: int, tile: int
) -> Array | None:
  """Returns which entries exist, None if all do."""
  return _triton.join_masks(
    _triton.inside_limit(row, per_tile, row.shape[0]),
    _triton.inside_limit(index, size, tile),
  )
