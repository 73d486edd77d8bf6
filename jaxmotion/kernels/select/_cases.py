"""Test arrays of top-k selection, shared by tests and benchmarks."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Case(NamedTuple):
  """Array of one selection test, and what to keep of its lanes.

  Attributes:
    make: returns the array.
    k: elements kept of a lane.
    planes: number of planes, the length of a lane.
  """

  make: Callable[[], np.ndarray]
  k: int
  planes: int


def _normal(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def special_values() -> np.ndarray:
  """Returns ties, signed zeros, subnormals and NaN in lanes of 12."""
  # One lane has padding.
  rng = np.random.default_rng(0)
  x = rng.standard_normal((8, 12), dtype=np.float32)
  x[1] = rng.integers(-2, 3, 12)
  x[2] = 0.0
  x[3] = [0.0, -0.0] * 6
  x[4, 2:7] = [np.nan, np.inf, -np.inf, -np.nan, np.nan]
  x[5] = 1e-42 * rng.integers(-5, 6, 12)
  x[6] = -1.0
  x[7] = 3.0
  return x.T.reshape(-1)[:-5]


CASES = {
  "one": Case(lambda: _normal(1), 1, 1),
  "all": Case(lambda: _normal(5, 5), 5, 5),
  "padded": Case(lambda: _normal(997), 1, 10),
  "mostly_padding": Case(lambda: _normal(11), 2, 8),
  "planes_in_flight": Case(lambda: _normal(23, 33), 2, 23),
  "many_planes": Case(lambda: _normal(128, 16), 2, 128),
  "planes_in_uneven_groups": Case(lambda: _normal(71, 13), 3, 71),
  "past_a_tile": Case(lambda: _normal(5, 515), 1, 5),
  "special_first": Case(special_values, 1, 12),
  "special": Case(special_values, 8, 12),
  "bfloat16": Case(lambda: _normal(40, 24).astype(jnp.bfloat16), 1, 40),
  "float16": Case(lambda: _normal(40, 24).astype(np.float16), 1, 40),
}
