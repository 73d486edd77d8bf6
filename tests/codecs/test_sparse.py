"""Codecs of the elements that are drawn, large or not zero."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jaxmotion.codecs import random_k, threshold, zero_value
from jaxmotion.core import make_key
from tests.codecs.jitted import normal, trip

DENSITIES = pytest.mark.parametrize("density", [0.01, 0.3, 1.0])


def decoded(codec, x, draws):
  def once(i):
    return codec.decode(codec.encode(x, (), make_key(i))[0], x)

  return np.asarray(jax.jit(jax.vmap(once))(jnp.arange(draws)), np.float64)


@DENSITIES
def test_exactly_k_values_travel(density):
  codec, x = random_k(density=density, scaled=False), normal(101)
  k = max(1, round(density * 101))
  for y in decoded(codec, x, 20):
    assert (y != 0).sum() == k
    # A projection: the elements that are kept are not changed.
    assert (y[y != 0] == x[y != 0]).all()


@DENSITIES
def test_scaled_error_is_the_stated_one(density):
  codec, x, draws = random_k(density=density), normal(101), 1000
  k = max(1, round(density * 101))
  short, longer = divmod(101, k)
  sizes = np.repeat([short + 1, short], [longer, k - longer])
  expected = (np.repeat(sizes - 1, sizes) * x.astype(np.float64) ** 2).sum()
  errors = ((decoded(codec, x, draws) - x) ** 2).sum(1)
  spread = errors.std() / np.sqrt(draws)
  assert abs(errors.mean() - expected) <= 5 * spread + 1e-6 * expected
  assert expected <= (-(-101 // k) - 1) * (x.astype(np.float64) ** 2).sum()


def test_positions_do_not_depend_on_the_worker():
  x = normal(1000)
  codec = random_k(density=0.1)
  a, b = (codec.encode(x, (), make_key(5, w))[0] for w in (0, 1))
  np.testing.assert_array_equal(a.values, b.values)
  c, _ = codec.encode(x, (), make_key(6))
  assert (np.asarray(a.values) != np.asarray(c.values)).any()


def test_summed_payloads_decode_to_the_sum():
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
  codec, x = random_k(density=0.1), normal(4, 1000)

  def total(x):
    key = make_key(5, lax.axis_index("d"))
    payload, _ = codec.encode(x[0], (), key)
    # The seed passes as equal on all workers: check_vma would refuse it else.
    summed = payload._replace(values=lax.psum(payload.values, "d"))
    return codec.decode(summed, x[0])

  spread = jax.shard_map(total, mesh=mesh, in_specs=P("d"), out_specs=P())
  one_by_one = sum(
    np.asarray(codec.decode(codec.encode(row, (), make_key(5))[0], row))
    for row in x
  )
  # Four float32 additions in some order.
  found = jax.jit(spread)(x)
  np.testing.assert_allclose(found, one_by_one, rtol=1e-5, atol=1e-4)


# A hundredth is searched for, a half is compacted.
@pytest.mark.parametrize(
  ("value", "capacity", "size"),
  [(2.8, 0.01, 4097), (1.0, 0.5, 1), (1.0, 0.5, 4097), (5.0, 0.1, 100)],
)
def test_all_above_the_threshold_travel_exactly(value, capacity, size):
  x = normal(size, seed=1)
  payload, y = trip(threshold(value=value, capacity=capacity), x)
  assert int(payload.count) == (np.abs(x) >= value).sum()
  assert int(payload.count) <= payload.values.size
  np.testing.assert_array_equal(y, np.where(np.abs(x) >= value, x, 0))


@pytest.mark.parametrize("capacity", [0.01, 0.1])
def test_overflow_drops_the_highest_positions_and_says_so(capacity):
  x = normal(4097, seed=1)
  payload, y = trip(threshold(value=1.0, capacity=capacity), x)
  k = round(capacity * 4097)
  above = np.abs(x) >= 1.0
  assert int(payload.count) == above.sum() > k == payload.values.size
  kept = above & (above.cumsum() <= k)
  np.testing.assert_array_equal(y, np.where(kept, x, 0))


def test_the_threshold_itself_and_non_finite_values_travel():
  x = np.array([0.5, -0.5, np.nextafter(np.float32(0.5), 0)], np.float32)
  _, y = trip(threshold(value=0.5, capacity=1), x)
  np.testing.assert_array_equal(y, [0.5, -0.5, 0])
  for bad in (np.nan, np.inf, -np.inf):
    x = normal(100, seed=1)
    x[60] = bad
    _, y = trip(threshold(value=5.0, capacity=0.1), x)
    np.testing.assert_array_equal(y, np.where(np.arange(100) == 60, x, 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_value_without_a_slot_is_not_hidden(bad):
  x = normal(4097, seed=1)
  x[-1] = bad
  codec = threshold(value=1.0, capacity=0.01)
  payload, y = trip(codec, x)
  finite = np.isfinite(y)
  assert int(payload.count) > payload.values.size and (~finite).sum() == 1
  x[-1] = 2.0
  np.testing.assert_array_equal(y[finite], trip(codec, x)[1][finite])


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


def test_a_short_array_is_one_tile():
  like = jax.ShapeDtypeStruct((500,), np.float32)
  payload = zero_value(capacity=1).payload_like(like)
  assert payload.mask.shape == (1, 16) and payload.words.shape == (1, 500)


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
