import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmotion.codecs._zero_value import zero_value
from jaxmotion.wire import payload_bytes

WORDS = {
  np.dtype(np.float32): np.uint32,
  np.dtype(np.float16): np.uint16,
  np.dtype(ml_dtypes.bfloat16): np.uint16,
}
DTYPES = pytest.mark.parametrize("dtype", WORDS, ids=str)


def bits(x):
  return np.asarray(x).view(WORDS[np.asarray(x).dtype])


def half_zero(size, dtype):
  rng = np.random.default_rng(size)
  return np.maximum(rng.normal(size=size), 0).astype(dtype)


def trip(codec, x):
  payload, _ = jax.jit(codec.encode)(jnp.asarray(x))
  return payload, jax.jit(lambda p: codec.decode(p, x))(payload)


@DTYPES
@pytest.mark.parametrize("size", [0, 1, 31, 32, 2000, 40001])
def test_it_is_lossless_where_everything_fits(dtype, size):
  x = half_zero(size, dtype)
  payload, y = trip(zero_value(capacity=1), x)
  assert int(payload.overflow) == 0
  np.testing.assert_array_equal(bits(y), bits(x))


@DTYPES
def test_every_bit_pattern_comes_back(dtype):
  # NaN of all kinds, infinities, subnormals, -0.0, and every other word.
  word = WORDS[dtype]
  patterns = np.arange(2**16).astype(word)
  if word == np.uint32:
    patterns = np.concatenate(
      [patterns, patterns << 16, patterns << 16 | patterns[::-1]]
    )
  x = patterns.view(dtype)
  payload, y = trip(zero_value(capacity=1), x)
  np.testing.assert_array_equal(bits(y), patterns)
  nonzero = patterns[patterns != 0]
  np.testing.assert_array_equal(payload.words[: nonzero.size], nonzero)


def test_minus_zero_takes_a_word():
  payload, y = trip(
    zero_value(capacity=1), np.array([0.0, -0.0, 0.0], np.float32)
  )
  assert payload.mask.tolist() == [0b010]
  assert np.signbit(y).tolist() == [False, True, False]


@DTYPES
def test_overflow_is_counted_and_what_fits_comes_back(dtype):
  x = half_zero(2000, dtype)
  payload, y = trip(zero_value(capacity=0.2), x)
  nonzero = bits(x) != 0
  assert int(payload.overflow) == nonzero.sum() - 400
  kept = nonzero & (nonzero.cumsum() <= 400)
  np.testing.assert_array_equal(bits(y), np.where(kept, bits(x), 0))


@DTYPES
def test_a_payload_is_a_bit_a_value_and_the_capacity(dtype):
  itemsize = np.dtype(dtype).itemsize
  x = jax.ShapeDtypeStruct((3200,), dtype)
  said = payload_bytes(zero_value(capacity=0.5), x)
  assert said == 3200 // 8 + 1600 * itemsize + 4
