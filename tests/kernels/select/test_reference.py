import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels.arrays import special_values
from jaxmotion.core import shape_dtype
from jaxmotion.kernels import plane_length
from jaxmotion.kernels.select import (
  _reference,
  topk_scatter,
  topk_select,
  topk_sum,
)

BLOCK = 12
KS = pytest.mark.parametrize("k", [1, 2, 8, 9, 11, 12])
# The most values found by reductions: none (XLA selects all), or all of them.
PATHS = pytest.mark.parametrize("most", [0, BLOCK], ids=["select", "reduce"])


def oracle(x, k, planes):
  """Sorts stably by magnitude, NaN first, negative before positive."""
  flat = np.asarray(x, np.float32).reshape(-1)
  padding = planes * plane_length(x.shape, planes) - flat.size
  cut = np.pad(flat, (0, padding)).reshape(planes, -1)
  u = cut.view(np.uint32).astype(np.int64)
  rank = 2 * (u & 0x7FFFFFFF) + (u >> 31)
  places = np.argsort(-rank, axis=0, kind="stable")[:k]
  return np.take_along_axis(cut, places, 0), places


@pytest.mark.parametrize(
  ("shape", "planes"), [((1030, 64), 33), ((70003,), 9), ((4200, 16), 4100)]
)
@pytest.mark.parametrize("k", [1, 3])
def test_the_last_plane_of_a_large_array_may_be_short(shape, planes, k):
  # Ties, so that the order of planes counts, and planes that do not exist.
  x = np.random.default_rng(2).integers(-3, 4, shape).astype(np.float32)
  x[-200:] *= 2
  values, places = jax.jit(lambda x: topk_select(x, k, planes))(x)
  wanted, where = oracle(x, k, planes)
  np.testing.assert_array_equal(places, where)
  np.testing.assert_array_equal(values, wanted)
  scattered = topk_scatter(values, places, shape_dtype(x), planes)
  kept = np.zeros((planes, values.shape[1]), np.float32)
  np.put_along_axis(kept, where, wanted, 0)
  np.testing.assert_array_equal(
    scattered, kept.reshape(-1)[: x.size].reshape(shape)
  )


@KS
@PATHS
def test_values_and_places_are_those_of_a_stable_sort(k, most, monkeypatch):
  monkeypatch.setattr(_reference, "_MAX_REDUCE", most)
  x = special_values()
  values, places = jax.jit(lambda x: topk_select(x, k, BLOCK))(x)
  wanted, where = oracle(x, k, BLOCK)
  assert places.dtype == jnp.uint32 and values.dtype == jnp.float32
  np.testing.assert_array_equal(places, where)
  np.testing.assert_array_equal(
    np.asarray(values).view(np.uint32), wanted.view(np.uint32)
  )


@pytest.mark.parametrize("size", [7 * 601, 7 * 601 - 3, 7 * 608, 7 * 608 - 3])
@pytest.mark.parametrize("k", [1, 3])
def test_lanes_of_any_number_are_selected_alone(size, k):
  # Next to each plane's end come the greatest values of the next plane.
  x = np.random.default_rng(2).standard_normal(size, dtype=np.float32)
  lanes = plane_length((size,), 7)
  for plane in range(7):
    x[plane * lanes : plane * lanes + 20] *= 100
  values, places = jax.jit(lambda x: topk_select(x, k, 7))(x)
  wanted, where = oracle(x, k, 7)
  np.testing.assert_array_equal(places, where)
  np.testing.assert_array_equal(values, wanted)


@KS
@PATHS
def test_scattering_puts_every_value_back_where_it_stood(k, most, monkeypatch):
  monkeypatch.setattr(_reference, "_MAX_REDUCE", most)
  x = special_values()
  values, places = oracle(x, k, BLOCK)
  kept = np.zeros((BLOCK, values.shape[1]), np.float32)
  np.put_along_axis(kept, places, values, 0)
  y = jax.jit(lambda v, p: topk_scatter(v, p, shape_dtype(x), BLOCK))(
    values, places.astype(np.uint32)
  )
  np.testing.assert_array_equal(y, kept.reshape(-1)[: x.size])


@pytest.mark.parametrize("block", [1, 5, 40])
def test_keeping_everything_loses_nothing(block):
  x = jnp.asarray(np.random.default_rng(1).normal(size=(6, 7)), jnp.float32)

  @jax.jit
  def trip(x):
    values, places = topk_select(x, block, block)
    return topk_scatter(values, places, shape_dtype(x), block)

  np.testing.assert_array_equal(trip(x), x)


def test_places_of_a_lane_are_all_different():
  select = jax.jit(lambda x: topk_select(x, 8, BLOCK))
  _, places = select(jnp.zeros(3 * BLOCK))
  np.testing.assert_array_equal(places, np.tile(np.arange(8)[:, None], (1, 3)))


def test_an_empty_array_has_no_blocks():
  values, places = topk_select(jnp.zeros((0, 4)), 2, 5)
  assert values.shape == places.shape == (2, 0)
  assert topk_scatter(values, places, jnp.zeros((0, 4)), 5).shape == (0, 4)


@pytest.mark.parametrize("planes", [1, 15, 16, 17, 32, 50])
def test_any_number_of_planes_is_compared(planes):
  x = np.random.default_rng(2).integers(-9, 9, 5 * planes).astype(np.float32)
  values, places = jax.jit(lambda x: topk_select(x, 1, planes))(x)
  wanted, where = oracle(x, 1, planes)
  np.testing.assert_array_equal(values, wanted)
  np.testing.assert_array_equal(places, where)


@pytest.mark.parametrize("workers", [1, 17])
def test_a_sum_is_that_of_what_each_worker_sent(workers):
  rng = np.random.default_rng(3)
  x = jnp.asarray(rng.normal(size=(workers, 50)), jnp.bfloat16)
  values, places = jax.jit(jax.vmap(lambda row: topk_select(row, 2, 8)))(x)
  scatter = jax.jit(jax.vmap(lambda v, p: topk_scatter(v, p, x[0], 8)))
  total = np.zeros(50, np.float32)
  for sent in np.asarray(scatter(values, places), np.float32):
    total = total + sent
  got = jax.jit(lambda v, p: topk_sum(v, p, x[0], 8))(values, places)
  assert got.dtype == jnp.float32
  np.testing.assert_array_equal(got, total)


@pytest.mark.parametrize("k", [0, 5])
def test_more_than_a_lane_holds_is_refused(k):
  with pytest.raises(ValueError, match=r"`k` must be an integer in \[1, 4\]"):
    topk_select(jnp.zeros(8), k, 4)
