import numpy as np

from jaxmotion.codecs import sign
from tests.codecs.jitted import normal, trip


def test_values_become_their_sign_times_the_blocks_mean_magnitude():
  # One row a block: 64 rows of 32 fill 32 planes.
  x = normal(64, 32)
  payload, y = trip(sign(block=32), x)
  assert payload.scale.size == 64
  mean = np.abs(x.astype(np.float64)).mean(1, keepdims=True)
  # 31 additions and a division, each rounded once.
  np.testing.assert_allclose(y, np.where(x < 0, -mean, mean), rtol=32 * 2**-24)


def test_zeros_of_both_signs_count_as_positive():
  _, y = trip(sign(), np.float32([0.0, -0.0, 6.0]))
  np.testing.assert_allclose(y, 2.0, rtol=2**-22)
  _, y = trip(sign(), np.zeros(9, np.float32))
  np.testing.assert_array_equal(y, 0)


def test_padding_takes_no_part_in_the_mean():
  for size in (1, 33, 1999):
    x = np.full(size, -3.0, np.float32)
    _, y = trip(sign(block=128), x)
    # Sums of threes are exact; the mean may be off by one rounding.
    np.testing.assert_allclose(y, x, rtol=2**-22)
  # The mean of one value is the value, however near the end of float32.
  for x in ([2e37], [1e-3] * 40 + [1e30]):
    x = np.array(x, np.float32)
    payload, y = trip(sign(block=8), x)
    assert np.isfinite(payload.scale).all()
    np.testing.assert_array_equal(np.sign(y), np.sign(x))
