import numpy as np
import pytest

from jaxmotion.codecs import threshold
from tests.codecs.jitted import normal, trip


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
