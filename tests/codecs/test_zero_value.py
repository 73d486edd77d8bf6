import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmotion.codecs import zero_value
from tests.codecs.jitted import normal, trip

WORDS = {
  np.dtype(np.float32): np.uint32,
  np.dtype(np.float16): np.uint16,
  np.dtype(ml_dtypes.bfloat16): np.uint16,
}
DTYPES = pytest.mark.parametrize("dtype", WORDS, ids=str)


def bits(x):
  return np.asarray(x).view(WORDS[np.asarray(x).dtype])


def half_zero(size, dtype):
  return np.maximum(normal(size, seed=size), 0).astype(dtype)


@pytest.mark.parametrize(
  ("dtype", "size"),
  [
    *((np.dtype(np.float32), n) for n in (0, 1, 31, 32, 40001)),
    *((dtype, 2000) for dtype in WORDS),
  ],
  ids=str,
)
def test_it_is_lossless_where_everything_fits(dtype, size):
  x = half_zero(size, dtype)
  payload, y = trip(zero_value(capacity=1), x)
  assert int(payload.overflow) == 0
  if size < 1024:  # A short array is one tile.
    assert payload.mask.shape == (1 if size else 0, max(1, -(-size // 32)))
    assert payload.words.shape[1] == max(1, size)
  np.testing.assert_array_equal(bits(y), bits(x))


@DTYPES
def test_every_bit_pattern_comes_back(dtype):
  # NaN of all kinds, infinities, subnormals, -0.0, and every other word.
  word = WORDS[dtype]
  patterns = np.arange(2**16).astype(word)
  if word == np.uint32:
    high = patterns << 16
    patterns = np.concatenate([patterns, high, high | patterns[::-1]])
  x = patterns.view(dtype)
  payload, y = trip(zero_value(capacity=1), x)
  np.testing.assert_array_equal(bits(y), patterns)
  for row, words in zip(patterns.reshape(-1, 1024), payload.words, strict=True):
    nonzero = row[row != 0]
    np.testing.assert_array_equal(words[: nonzero.size], nonzero)


@pytest.mark.parametrize(
  ("dtype", "tile"), [*((dtype, 64) for dtype in WORDS), ("float32", 1024)]
)
def test_overflow_is_counted_and_what_fits_comes_back(dtype, tile):
  x = half_zero(2000, dtype)
  payload, y = trip(zero_value(capacity=0.4, tile=tile), x)
  rows = np.pad(bits(x), (0, -2000 % tile)).reshape(-1, tile)
  room = round(0.4 * tile)
  kept = (rows != 0) & ((rows != 0).cumsum(1) <= room)
  wanted = np.where(kept, rows, 0).reshape(-1)[:2000]
  np.testing.assert_array_equal(bits(y), wanted)
  np.testing.assert_array_equal(payload.count, (rows != 0).sum(1))
  assert payload.overflow.dtype == jnp.uint32
  assert int(payload.overflow) == (rows != 0).sum() - kept.sum() > 0


def test_overflow_of_payloads_side_by_side_is_counted_for_each():
  x = jnp.asarray(np.stack([half_zero(500, np.float32), np.zeros(500)]))
  encode = jax.jit(jax.vmap(zero_value(capacity=0.1).encode))
  payloads, _ = encode(x.astype(jnp.float32))
  dropped = np.count_nonzero(x[0]) - 50
  assert payloads.overflow.tolist() == [dropped, 0]


@pytest.mark.parametrize("tile", [0, 96, 2048])
def test_tiles_are_powers_of_two(tile):
  with pytest.raises(ValueError, match="`tile` must be"):
    zero_value(capacity=0.5, tile=tile)
