import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.codecs import sign
from jaxmotion.wire import payload_bytes
from tests.codecs.jitted import normal, trip


def test_values_become_their_sign_times_the_blocks_mean_magnitude():
  # One row a block: 64 rows of 32 fill 32 planes.
  x = normal(64, 32)
  payload, y = trip(sign(block=32), x)
  assert payload.scale.size == 64
  mean = np.abs(x.astype(np.float64)).mean(1, keepdims=True)
  # 31 additions and a division, each rounded once.
  np.testing.assert_allclose(y, np.where(x < 0, -mean, mean), rtol=32 * 2**-24)


@pytest.mark.parametrize("size", [1, 5, 33, 1000, 1999])
def test_padding_takes_no_part_in_the_mean(size):
  x = np.full(size, -3.0, np.float32)
  _, y = trip(sign(block=128), x)
  # Sums of threes are exact; the mean may be off by one rounding.
  np.testing.assert_allclose(y, x, rtol=2**-22)


def test_zeros_of_both_signs_count_as_positive():
  _, y = trip(sign(), np.float32([0.0, -0.0, 6.0]))
  np.testing.assert_allclose(y, 2.0, rtol=2**-22)
  _, y = trip(sign(), np.zeros(9, np.float32))
  np.testing.assert_array_equal(y, 0)


def test_a_payload_is_a_bit_a_value_and_a_scale_a_block():
  like = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
  assert payload_bytes(sign(block=512), like) == (1 << 16) // 8 + 4 * 128


@pytest.mark.parametrize("size", [1, 100, 2048])
def test_it_contracts_by_the_stated_share(size):
  x = normal(size)
  exact = x.astype(np.float64)
  share = np.abs(exact).sum() ** 2 / (size * (exact**2).sum())
  _, y = trip(sign(block=4096), x)
  left = ((exact - y) ** 2).sum()
  np.testing.assert_allclose(
    left, (1 - share) * (exact**2).sum(), atol=1e-5 * (exact**2).sum()
  )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_spoils_its_block_and_no_other(bad):
  x = normal(64, 32)
  x[7, 3] = bad
  _, y = trip(sign(block=32), x)
  spoilt = ~np.isfinite(y)
  assert spoilt[7].all() and spoilt.sum() == 32


def test_padding_adds_nothing_to_the_mean():
  # The mean of one value is the value, however near the end of float32.
  for x in ([2e37], [1e-3] * 40 + [1e30]):
    x = np.array(x, np.float32)
    payload, y = trip(sign(block=8), x)
    assert np.isfinite(payload.scale).all()
    np.testing.assert_array_equal(np.sign(y), np.sign(x))
