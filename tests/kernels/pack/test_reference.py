import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.kernels.pack import (
  field_widths,
  num_planes,
  pack,
  unpack,
  unpack_to_float,
)

WIDTHS = [*range(1, 17), 24, 32]
# One compilation a width serves most tests.
COLUMNS = 32
BITS = pytest.mark.parametrize("bits", WIDTHS)
PACK = functools.partial(jax.jit, static_argnums=1)(pack)
UNPACK = functools.partial(jax.jit, static_argnums=1)(unpack)
UNPACK_TO_FLOAT = functools.partial(jax.jit, static_argnums=1)(unpack_to_float)


def codes_of(bits, shape):
  rng = np.random.default_rng(bits)
  return rng.integers(0, 2**bits, (num_planes(bits), *shape), dtype=np.uint32)


@BITS
def test_a_width_is_a_sum_of_powers_of_two_that_fill_words(bits):
  assert sum(field_widths(bits)) == bits
  assert list(field_widths(bits)) == sorted(
    set(field_widths(bits)), reverse=True
  )
  for f in field_widths(bits):
    assert f & (f - 1) == 0
    assert num_planes(bits) * f % 32 == 0


@pytest.mark.parametrize(
  ("bits", "shape"),
  [(b, (COLUMNS,)) for b in WIDTHS]
  + [(b, s) for b in (3, 8, 13) for s in ((2, 3), (0,), ())],
)
def test_unpacking_inverts_packing(bits, shape):
  codes = codes_of(bits, shape)
  words = PACK(codes, bits)
  assert words.shape == (num_planes(bits) * bits // 32, *shape)
  assert words.dtype == jnp.uint32
  np.testing.assert_array_equal(UNPACK(words, bits), codes)


@BITS
def test_a_code_sets_only_its_own_bits(bits):
  # Column i holds nothing but code i, of all ones.
  count = num_planes(bits)
  ones = np.uint32(2**bits - 1)
  codes = np.eye(count, COLUMNS, dtype=np.uint32) * ones
  words = np.asarray(PACK(codes, bits))
  assert np.bitwise_count(words).sum(0).tolist() == [bits] * count + [0] * (
    COLUMNS - count
  )
  # Together they fill every word, so no two share a bit.
  np.testing.assert_array_equal(np.bitwise_or.reduce(words, 1), 2**32 - 1)
  np.testing.assert_array_equal(UNPACK(words, bits), codes)


@BITS
def test_a_column_does_not_depend_on_its_neighbors(bits):
  codes = codes_of(bits, (COLUMNS,))
  alone = np.where(np.arange(COLUMNS) == 2, codes, 0).astype(np.uint32)
  words, own = PACK(codes, bits), PACK(alone, bits)
  np.testing.assert_array_equal(words[:, 2], own[:, 2])
  assert not np.delete(np.asarray(own), 2, axis=1).any()


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_word_j_holds_code_j_of_every_plane_from_the_lowest_bit_up(bits):
  codes = codes_of(bits, (COLUMNS,))
  words = np.asarray(PACK(codes, bits))
  for plane in range(num_planes(bits)):
    got = (words[0].astype(np.uint64) >> np.uint64(plane * bits)) % 2**bits
    np.testing.assert_array_equal(got, codes[plane])


@pytest.mark.parametrize("bits", [3, 6, 11, 24])
def test_other_widths_are_words_of_each_power_of_two_narrowest_first(bits):
  codes = codes_of(bits, (COLUMNS,))
  rows, low = [], 0
  for f in reversed(field_widths(bits)):
    field = (codes >> low) % 2**f
    per_word = 32 // f
    for start in range(0, num_planes(bits), per_word):
      rows.append(PACK(field[start : start + per_word], f)[0])
    low += f
  np.testing.assert_array_equal(PACK(codes, bits), rows)


@pytest.mark.parametrize("bits", [1, 7, 8, 16, 24])
def test_values_are_the_codes_as_floats(bits):
  codes = codes_of(bits, (COLUMNS,))
  values = UNPACK_TO_FLOAT(PACK(codes, bits), bits)
  assert values.dtype == jnp.float32
  np.testing.assert_array_equal(values, codes.astype(np.float32))


@pytest.mark.parametrize("bits", [0, 33])
def test_other_widths_are_refused(bits):
  with pytest.raises(ValueError, match=r"`bits` must be .* in \[1, 32\]"):
    field_widths(bits)
