"""Codes that tests and benches share."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
  """One packing.

  Attributes:
    make: returns the codes, uint32, each below 2**bits.
    bits: width of a code.
  """

  make: Callable[[], np.ndarray]
  bits: int


def _codes(bits: int, size: int) -> Case:
  def make() -> np.ndarray:
    rng = np.random.default_rng(bits)
    return rng.integers(0, 2**bits, size, dtype=np.uint32)

  return Case(make, bits)


# Packed indices have 10 to 16 bits and more; 11 are three fields.
CASES = {
  **{f"{bits}_bits": _codes(bits, 999) for bits in (1, 2, 3, 4, 6, 8, 11, 22)},
  "one": _codes(3, 1),
  "whole_columns": _codes(4, 64),
  "past_a_tile": _codes(8, 4 * 513),
  "whole_tiles": _codes(8, 4 * 1024),
}
