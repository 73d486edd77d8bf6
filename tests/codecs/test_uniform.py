import numpy as np
import pytest

from jaxmotion.codecs import uniform
from jaxmotion.core import make_key
from tests.codecs.jitted import normal, trip


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_large_offset_costs_min_max_no_accuracy(bits):
  for offset in (-1e6, 1e4, 3e7):
    x = normal(40, 32) + np.float32(offset)
    _, y = trip(uniform(bits=bits, symmetric=False, block=32), x)
    step = np.ptp(x) / (2**bits - 1)
    # Half a step, and float32's own spacing at the offset.
    assert np.abs(y - x).max() <= step / 2 * (1 + 2.0**-14) + np.spacing(
      np.float32(abs(offset) * 1.01)
    )


# Ranges that are no finite float, and steps as large as one.
@pytest.mark.parametrize(
  ("bits", "symmetric", "most"),
  [
    *((bits, True, 2.0**125) for bits in (1, 3, 8)),
    *((bits, False, 2.0**125) for bits in (2, 8)),
    *((bits, True, 3e38) for bits in (1, 2, 3)),
    *((bits, False, 3e38) for bits in (1, 2)),
    *((bits, False, float(np.finfo(np.float32).max)) for bits in (3, 8)),
  ],
)
def test_a_huge_range_does_not_overflow(bits, symmetric, most):
  x = np.float32([-most, most, 0.3 * most, 0, -1] * 20)
  _, y = trip(uniform(bits=bits, symmetric=symmetric, block=16), x)
  assert np.isfinite(y).all()
  steps = 2**bits - 1 if not symmetric else max(1, 2**bits - 2)
  error = np.abs(y.astype(np.float64) - x)
  assert error.max() <= most / steps * (1 + 2.0**-12)


def test_steps_too_small_decode_to_zero_or_to_the_minimum():
  x = np.full(40, 1e-38, np.float32)
  x[::2] = 2e-38
  _, y = trip(uniform(bits=8), x)
  np.testing.assert_array_equal(y, 0)
  # The minimum is kept where half of it is no subnormal either.
  least = np.float32(2.0**-120)
  x = np.full(9, least, np.float32)
  _, y = trip(uniform(bits=8, symmetric=False), x)
  np.testing.assert_array_equal(y, least)


def test_workers_round_apart_and_keys_are_required():
  codec, x = uniform(bits=2, rounding="stochastic"), normal(300)
  a, b = (trip(codec, x, make_key(0, w))[1] for w in (0, 1))
  assert codec.needs_key and (a != b).any()
  with pytest.raises(ValueError, match="`key` must be a jaxmotion.Key"):
    codec.encode(x)


@pytest.mark.optimized
@pytest.mark.parametrize("shape", [(4096,), (64, 64), (100, 100)])
def test_a_nan_anywhere_reaches_its_whole_block(shape):
  # XLA:CPU makes vector instructions of a plain minimum over these shapes.
  codec = uniform(bits=8, symmetric=False)
  rng = np.random.default_rng(1)
  for _ in range(5):
    x = rng.normal(size=shape).astype(np.float32)
    place = rng.integers(x.size)
    x.flat[place] = np.nan
    y = trip(codec, x)[1].reshape(-1)
    assert np.isnan(y[place]) and np.isnan(y).sum() > 100
