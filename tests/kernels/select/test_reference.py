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

# Frozen payloads of codecs have optimized programs.
pytestmark = pytest.mark.unoptimized
BLOCK = 12


def oracle(x, k, planes):
  """Sorts stably by magnitude, NaN first, negative before positive."""
  flat = np.asarray(x, np.float32).reshape(-1)
  padding = planes * plane_length(x.shape, planes) - flat.size
  cut = np.pad(flat, (0, padding)).reshape(planes, -1)
  u = cut.view(np.uint32).astype(np.int64)
  rank = 2 * (u & 0x7FFFFFFF) + (u >> 31)
  places = np.argsort(-rank, axis=0, kind="stable")[:k]
  return np.take_along_axis(cut, places, 0), places


def check_selected(x, k, planes):
  """Compares what is selected, and scattered again, with the oracle's."""

  @jax.jit
  def trip(x):
    found = topk_select(x, k, planes)
    return *found, topk_scatter(*found, shape_dtype(x), planes)

  values, places, y = trip(x)
  wanted, where = oracle(x, k, planes)
  assert places.dtype == jnp.uint32 and values.dtype == jnp.float32
  np.testing.assert_array_equal(places, where)
  np.testing.assert_array_equal(
    np.asarray(values).view(np.uint32), wanted.view(np.uint32)
  )
  kept = np.zeros((planes, values.shape[1]), np.float32)
  np.put_along_axis(kept, where, wanted, 0)
  np.testing.assert_array_equal(y, kept.reshape(-1)[: x.size].reshape(x.shape))


@pytest.mark.parametrize(
  ("shape", "planes", "k"),
  [
    ((1030, 64), 33, 3),
    ((70003,), 9, 1),
    ((70003,), 9, 3),
    ((4200, 16), 4100, 3),
  ],
)
def test_the_last_plane_of_a_large_array_may_be_short(shape, planes, k):
  # Ties, so that the order of planes counts, and planes that do not exist.
  x = np.random.default_rng(2).integers(-3, 4, shape).astype(np.float32)
  x[-200:] *= 2
  check_selected(x, k, planes)


# The most values found by reductions: none (XLA selects all), or all of them.
@pytest.mark.parametrize("most", [0, BLOCK], ids=["select", "reduce"])
@pytest.mark.parametrize("k", [1, 2, 8, 12])
def test_values_and_places_are_those_of_a_stable_sort(k, most, monkeypatch):
  monkeypatch.setattr(_reference, "_MAX_REDUCE", most)
  check_selected(special_values(), k, BLOCK)


@pytest.mark.parametrize(
  ("size", "k"),
  [(7 * 601, 1), (7 * 601 - 3, 3), (7 * 608, 3), (7 * 608 - 3, 1)],
)
def test_lanes_of_any_number_are_selected_alone(size, k):
  # Next to each plane's end come the greatest values of the next plane.
  x = np.random.default_rng(2).standard_normal(size, dtype=np.float32)
  lanes = plane_length((size,), 7)
  for plane in range(7):
    x[plane * lanes : plane * lanes + 20] *= 100
  check_selected(x, k, 7)


def test_an_empty_array_has_no_blocks():
  values, places = topk_select(jnp.zeros((0, 4)), 2, 5)
  assert values.shape == places.shape == (2, 0)
  assert topk_scatter(values, places, jnp.zeros((0, 4)), 5).shape == (0, 4)


@pytest.mark.parametrize("planes", [1, 15, 16, 17, 50])
def test_any_number_of_planes_is_compared(planes):
  x = np.random.default_rng(2).integers(-9, 9, 5 * planes).astype(np.float32)
  check_selected(x, 1, planes)


@pytest.mark.parametrize("workers", [1, 17])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
  ("shape", "k", "planes"), [((50,), 2, 8), ((20, 9), 9, 20), ((7, 9), 12, 16)]
)
def test_a_sum_is_that_of_what_each_worker_sent(
  shape, k, planes, dtype, workers
):
  rng = np.random.default_rng(3)
  x = jnp.asarray(rng.normal(size=(workers, *shape)), dtype)
  select = jax.vmap(lambda row: topk_select(row, k, planes))
  values, places = jax.jit(select)(x)
  scatter = jax.jit(jax.vmap(lambda v, p: topk_scatter(v, p, x[0], planes)))
  total = np.zeros(shape, np.float32)
  for sent in np.asarray(scatter(values, places), np.float32):
    total = total + sent
  got = jax.jit(lambda v, p: topk_sum(v, p, x[0], planes))(values, places)
  assert got.dtype == jnp.float32
  np.testing.assert_array_equal(got, total)
