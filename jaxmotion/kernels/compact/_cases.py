"""Test arrays of compaction, shared by tests and benchmarks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
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


def _normal_values(size: int) -> np.ndarray:
  return np.random.default_rng(size).standard_normal(size, dtype=np.float32)


def _special_values(dtype: Any = np.float32) -> np.ndarray:
  values = [0.0, -0.0, 1e-42, -1e-42, 0.5, -0.5, 1.0, -1.0, 3e4]
  values += [np.inf, -np.inf, np.nan, -np.nan]
  return np.array(values * 9, np.float32).astype(dtype)


# Arrays whose elements are marked; some magnitudes equal the threshold.
FLOATS: dict[str, Callable[[], np.ndarray]] = {
  "one": lambda: np.ones(1, np.float32),
  "word": lambda: _normal_values(32),
  "odd": lambda: _normal_values(997),
  "tile": lambda: _normal_values(2048),
  "past_a_tile": lambda: _normal_values(2049),
  "special": lambda: _special_values(),
  "float16": lambda: _special_values(np.float16),
  "bfloat16": lambda: _special_values(jnp.bfloat16),
}
