import functools

import jax
import numpy as np
import pytest

from experiments.kernels.arrays import MARKED
from jaxmotion.kernels.compact import (
  _pallas_triton as triton,
  _reference as reference,
)
from tests.kernels.compact.tiles import TILES
from tests.kernels.lowering import check_kernel, interpret

check = functools.partial(check_kernel, triton, reference)


@pytest.mark.parametrize(
  ("case", "least"), [*((case, 1.0) for case in MARKED), ("special", 1e-42)]
)
def test_marks_are_those_of_the_reference(case, least):
  check("threshold_bitmap", MARKED[case](), threshold=least)


# One word, words of two programs; few marks in a word and many.
@pytest.mark.parametrize(
  ("size", "density", "share"),
  [
    *((4100, d, s) for d in (0.02, 0.6) for s in (0.01, 1.0)),
    (1, 0.02, 1.0),
    (1, 0.6, 1.0),
  ],
)
def test_positions_are_those_of_the_first_marks(size, density, share):
  keep = np.random.default_rng(size).random(size) < density
  bitmap = reference.threshold_bitmap(1.0 * keep, threshold=1.0)
  start, capacity = reference.prefix_counts(bitmap), max(1, int(share * size))
  find = functools.partial(triton.bitmap_positions, capacity=capacity)
  got = jax.jit(interpret(find))(bitmap, start)
  assert got.shape == (capacity,) and got.dtype == np.int32
  found = np.flatnonzero(keep)[:capacity]
  np.testing.assert_array_equal(got[: found.size], found)


@pytest.mark.parametrize("case", TILES)
def test_compaction_and_expansion_are_those_of_the_reference(case):
  make, tile, capacity = TILES[case]
  words = make()
  tiles = check("compact_tiles", words, tile=tile, capacity=capacity)
  check("expand_tiles", tiles, size=words.size)
