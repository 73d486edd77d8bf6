import functools

import jax
import numpy as np
import pytest

from jaxmotion.kernels.pack import (
  field_widths,
  num_planes,
  pack,
  pack_flat,
  unpack_flat,
)

# One field, two, three and five of them, below and above half a word.
PACK = functools.partial(jax.jit, static_argnums=1)(pack)
PACK_FLAT = functools.partial(jax.jit, static_argnums=1)(pack_flat)
UNPACK_FLAT = functools.partial(jax.jit, static_argnums=(1, 2))(unpack_flat)
BITS = pytest.mark.parametrize("bits", [1, 3, 4, 7, 8, 11, 14, 16, 22, 31, 32])


def codes_of(bits: int, size: int) -> np.ndarray:
  rng = np.random.default_rng(bits)
  return rng.integers(0, 2**bits, size, dtype=np.uint32)


def pack_by_definition(codes: np.ndarray, bits: int) -> np.ndarray:
  """Fields from the narrowest up, plane i of a word in bits [i f, i f + f)."""
  rows, low = [], 0
  for f in reversed(field_widths(bits)):
    field = (codes.astype(np.uint64) >> np.uint64(low)) & np.uint64(2**f - 1)
    for start in range(0, codes.shape[0], 32 // f):
      word = np.zeros(codes.shape[1:], np.uint64)
      for i in range(32 // f):
        word |= field[start + i] << np.uint64(i * f)
      rows.append(word)
    low += f
  return np.stack(rows)


@pytest.mark.parametrize(
  ("bits", "trailing"),
  [*((bits, (2, 3)) for bits in (*range(1, 17), 22, 31, 32)), (7, (1,))],
)
def test_words_are_the_fields_in_order(bits, trailing):
  shape = (num_planes(bits), *trailing)
  codes = codes_of(bits, int(np.prod(shape))).reshape(shape)
  words = PACK(codes, bits)
  np.testing.assert_array_equal(words, pack_by_definition(codes, bits))


@BITS
def test_any_number_of_codes_comes_back_from_less_than_a_column_more(bits):
  for size in (0, 1, 31, 100):
    codes = codes_of(bits, size)
    words = PACK_FLAT(codes, bits)
    columns = -(-size // num_planes(bits))
    assert words.shape == (num_planes(bits) * bits // 32, columns)
    np.testing.assert_array_equal(UNPACK_FLAT(words, bits, size), codes)
