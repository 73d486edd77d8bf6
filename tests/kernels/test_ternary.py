import jax.numpy as jnp
import numpy as np

from jaxmotion.kernels.pack._reference import mul_high
from jaxmotion.kernels.ternary._op import pack_trits, unpack_trits


def codes_of(numbers: np.ndarray) -> np.ndarray:
  powers = 3 ** np.arange(19, -1, -1, dtype=np.uint64)
  return (numbers[None] // powers[:, None] % np.uint64(3)).astype(np.uint32)


def test_words_spell_numbers_from_end_to_end():
  # Errors grow with the number, so both ends and what lies between.
  rng = np.random.default_rng(0)
  numbers = np.concatenate(
    [
      np.arange(100),
      3**20 - 1 - np.arange(100),
      3 ** np.arange(20),
      rng.integers(0, 3**20, 5000),
    ]
  ).astype(np.uint64)
  codes = codes_of(numbers)
  words = np.asarray(pack_trits(jnp.asarray(codes)))
  assert words.shape == (1, numbers.size) and words.dtype == np.uint32
  np.testing.assert_array_equal(unpack_trits(jnp.asarray(words)), codes)
  # The fraction of 3^20 in binary, rounded up by less than the next number.
  exact = numbers.astype(object) * 2**32
  above = words[0].astype(object) * 3**20 - exact
  assert (above >= 0).all() and (above < 2**32).all()


def test_a_high_word_is_the_high_half_of_the_64_bit_product():
  rng = np.random.default_rng(0)
  edges = np.array([0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1], np.uint32)
  random = rng.integers(0, 2**32, 1000, dtype=np.uint32)
  a = np.concatenate([np.repeat(edges, edges.size), random])
  b = np.concatenate([np.tile(edges, edges.size), random[::-1]])
  high = (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)
  np.testing.assert_array_equal(mul_high(jnp.asarray(a), jnp.asarray(b)), high)
