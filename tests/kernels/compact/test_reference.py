import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels.arrays import MARKED
from jaxmotion.kernels.compact import (
  bitmap_positions,
  compact_tiles,
  expand_tiles,
  prefix_counts,
  threshold_bitmap,
)
from tests.kernels.compact.tiles import TILES

# Frozen payloads of codecs have optimized programs.
pytestmark = pytest.mark.unoptimized
# One word, one level of the tree, two levels, three.
SIZES = [0, 1, 32, 33, 1024, 1100, 40000]
DENSITIES = (0.0, 0.02, 0.5, 1.0)


def keep_of(size, density):
  return np.random.default_rng(size).random(size) < density


def packed(keep):
  padded = np.pad(keep, (0, -keep.size % 32))
  return np.packbits(padded, bitorder="little").view(np.uint32)


# Where magnitudes end and where they are special, thresholds are as well.
@pytest.mark.parametrize(
  ("case", "least"),
  [
    *((case, 1.0) for case in MARKED),
    *((c, t) for c in ("special", "float16", "bfloat16") for t in (1e-42, 3e4)),
  ],
)
def test_magnitudes_from_the_least_on_and_nan_are_marked(case, least):
  x = MARKED[case]()
  wide = x.astype(np.float32)
  keep = ~(np.abs(wide) < np.float32(least))
  got = jax.jit(lambda x: threshold_bitmap(x, least))(x)
  np.testing.assert_array_equal(got, packed(keep))


@pytest.mark.parametrize("size", SIZES)
def test_prefix_counts_are_of_the_marks_before_each_word(size):
  program = jax.jit(prefix_counts)
  for density in DENSITIES:
    keep = keep_of(size, density)
    padded = np.pad(keep, (0, -size % 32)).reshape(-1, 32).sum(1)
    expected = np.concatenate([[0], padded.cumsum()])
    np.testing.assert_array_equal(program(packed(keep)), expected)


# Below one slot in 8 words a search finds their words, above it a scatter.
@pytest.mark.parametrize(
  ("size", "share"),
  [*((size, 0.5) for size in SIZES), (1100, 0.01), (40000, 0.01), (40000, 0.1)],
)
def test_positions_are_those_of_the_first_marks(size, share):
  capacity = int(share * size)
  program = jax.jit(lambda b: bitmap_positions(b, prefix_counts(b), capacity))
  for density in DENSITIES:
    keep = keep_of(size, density)
    got = program(packed(keep))
    assert got.shape == (capacity,)
    found = np.flatnonzero(keep)[:capacity]
    np.testing.assert_array_equal(got[: found.size], found)


@pytest.mark.parametrize("case", TILES)
def test_words_of_a_tile_are_packed_in_order_and_given_back(case):
  make, tile, capacity = TILES[case]
  words = make()

  @jax.jit
  def trip(words):
    tiles = compact_tiles(words, tile, capacity)
    return tiles, tiles.overflow, expand_tiles(tiles, words.size)

  got, overflow, back = trip(words)
  rows = np.pad(words, (0, -words.size % tile)).reshape(-1, tile)
  np.testing.assert_array_equal(got.mask.reshape(-1), packed(rows.ravel() != 0))
  np.testing.assert_array_equal(got.count, (rows != 0).sum(1))
  assert got.words.dtype == words.dtype
  assert got.words.shape == (len(rows), capacity)
  for row, kept in zip(rows, got.words, strict=True):
    nonzero = row[row != 0][:capacity]
    np.testing.assert_array_equal(
      kept, np.pad(nonzero, (0, capacity - nonzero.size))
    )
  held = (rows != 0).cumsum(1) <= capacity
  wanted = np.where(held, rows, 0).reshape(-1)[: words.size]
  assert back.dtype == words.dtype
  np.testing.assert_array_equal(back, wanted)
  dropped = np.count_nonzero(words) - np.count_nonzero(wanted)
  assert int(overflow) == dropped


@pytest.mark.parametrize(
  ("tile", "capacity", "message"),
  [
    (48, 1, "`tile` must be a multiple of 32, got 48"),
    (64, 65, r"`capacity` must be an integer in \[1, 64\], got 65"),
  ],
)
def test_tiles_that_cannot_be_are_refused(tile, capacity, message):
  with pytest.raises(ValueError, match=message):
    compact_tiles(jnp.zeros(64, jnp.uint32), tile, capacity)
