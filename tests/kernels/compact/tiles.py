"""Words that are compacted, and the form of their tiles."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
  """Words of one compaction test, and the form of its tiles.

  Attributes:
    make: returns the words.
    tile: words per tile.
    capacity: words kept of a tile.
  """

  make: Callable[[], np.ndarray]
  tile: int
  capacity: int


def _sparse_words(
  size: int, density: float, dtype: type[np.unsignedinteger] = np.uint32
) -> np.ndarray:
  """Returns words of which a share is not zero; tiles differ in how many."""
  rng = np.random.default_rng(size)
  top = np.iinfo(dtype).max
  words = rng.integers(1, top, size, dtype, endpoint=True)
  return np.where(rng.random(size) < density, words, dtype(0))


def _bits_of_floats() -> np.ndarray:
  x = np.array([0.0, -0.0, 1e-42, 1.0, np.inf, np.nan] * 20, np.float32)
  return x.view(np.uint32)


TILES = {
  "one": Case(lambda: _sparse_words(1, 1.0), 32, 1),
  "zeros": Case(lambda: _sparse_words(256, 0.0), 128, 64),
  "full": Case(lambda: _sparse_words(256, 1.0), 128, 128),
  "too_many": Case(lambda: _sparse_words(256, 0.6), 64, 33),
  "past_a_tile": Case(lambda: _sparse_words(1025, 0.5), 1024, 512),
  "uneven": Case(lambda: _sparse_words(997, 0.3), 96, 40),
  "uint16": Case(lambda: _sparse_words(500, 0.5, np.uint16), 256, 127),
  "uint8": Case(lambda: _sparse_words(500, 0.5, np.uint8), 256, 127),
  "floats": Case(_bits_of_floats, 64, 60),
}
