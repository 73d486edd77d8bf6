import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.kernels.pack import _reference, pack_flat, unpack_flat
from jaxmotion.kernels.pack._reference import field_widths, num_planes

# The contract and the frozen payloads of codecs have optimized programs.
pytestmark = pytest.mark.unoptimized
# One field, two, three and five of them, below and above half a word.
WIDTHS = (1, 3, 4, 7, 8, 11, 14, 16, 22, 31, 32)
PACK, PACK_FLAT, UNPACK, UNPACK_TO_FLOAT = (
  functools.partial(jax.jit, static_argnums=1)(fn)
  for fn in (
    _reference.pack,
    pack_flat,
    _reference.unpack,
    _reference.unpack_to_float,
  )
)
UNPACK_FLAT = functools.partial(jax.jit, static_argnums=(1, 2))(unpack_flat)


def codes_of(bits, *shape):
  rng = np.random.default_rng(bits)
  return rng.integers(0, 2**bits, shape, dtype=np.uint32)


def pack_by_definition(codes, bits):
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


@pytest.mark.parametrize("bits", range(1, 33))
def test_a_width_is_a_sum_of_powers_of_two_that_fill_words(bits):
  assert sum(field_widths(bits)) == bits
  assert list(field_widths(bits)) == sorted(
    set(field_widths(bits)), reverse=True
  )
  for f in field_widths(bits):
    assert f & (f - 1) == 0
    assert num_planes(bits) * f % 32 == 0


@pytest.mark.parametrize(
  ("bits", "trailing"),
  [(b, (2, 3)) for b in WIDTHS]
  + [(b, s) for b in (3, 8) for s in ((1,), (0,), ())],
)
def test_words_are_the_fields_in_order_and_give_the_codes_back(bits, trailing):
  codes = codes_of(bits, num_planes(bits), *trailing)
  words = PACK(codes, bits)
  assert words.shape == (_reference.word_rows(bits), *trailing)
  assert words.dtype == jnp.uint32
  np.testing.assert_array_equal(words, pack_by_definition(codes, bits))
  np.testing.assert_array_equal(UNPACK(words, bits), codes)


@pytest.mark.parametrize("bits", [1, 7, 11, 32])
def test_any_number_of_codes_comes_back_from_less_than_a_column_more(bits):
  for size in (0, 1, 100):
    codes = codes_of(bits, size)
    words = PACK_FLAT(codes, bits)
    columns = -(-size // num_planes(bits))
    assert words.shape == (_reference.word_rows(bits), columns)
    np.testing.assert_array_equal(UNPACK_FLAT(words, bits, size), codes)


@pytest.mark.parametrize("bits", [1, 7, 24])
def test_values_are_the_codes_as_floats(bits):
  codes = codes_of(bits, num_planes(bits), 32)
  values = UNPACK_TO_FLOAT(PACK(codes, bits), bits)
  assert values.dtype == jnp.float32
  np.testing.assert_array_equal(values, codes.astype(np.float32))


@pytest.mark.parametrize("bits", [0, 33])
def test_other_widths_are_refused(bits):
  for run in (field_widths, lambda bits: pack_flat(codes_of(1, 32), bits)):
    with pytest.raises(ValueError, match=r"`bits` must be .* in \[1, 32\]"):
      run(bits)
