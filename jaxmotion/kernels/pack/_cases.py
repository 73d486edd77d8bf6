"""Test codes of bit packing, shared by tests and benchmarks."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
  """Codes of one packing test, and their width.

  Attributes:
    make: returns the codes, uint32, each below 2**bits.
    bits: width of a code.
  """

  make: Callable[[], np.ndarray]
  bits: int


def _random_codes(bits: int, size: int) -> Case:
  def make() -> np.ndarray:
    rng = np.random.default_rng(bits)
    return rng.integers(0, 2**bits, size, dtype=np.uint32)

  return Case(make, bits)


# Packed indices have 10 to 16 bits and more; 11 bits are three fields.
CASES = {
  **{
    f"{bits}_bits": _random_codes(bits, 999)
    for bits in (1, 2, 3, 4, 6, 8, 11, 22)
  },
  "one": _random_codes(3, 1),
  "whole_columns": _random_codes(4, 64),
  "past_a_tile": _random_codes(8, 4 * 513),
  "whole_tiles": _random_codes(8, 4 * 1024),
}
