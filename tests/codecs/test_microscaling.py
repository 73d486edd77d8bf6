import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmotion.codecs import microscaling
from tests.codecs import jitted

NAMES = (
  "float8_e4m3fn",
  "float8_e5m2",
  "float6_e3m2fn",
  "float6_e2m3fn",
  "float4_e2m1fn",
)
FORMATS = pytest.mark.parametrize("name", NAMES)
EMAX = dict(zip(NAMES, (8, 15, 4, 2, 2), strict=True))


def trip(name, x):
  return jitted.trip(microscaling(format=name), x)


def oracle(name, x):
  """Encodes by the specification, in float64 with ml_dtypes' conversions."""
  kind = getattr(ml_dtypes, name)
  most = float(ml_dtypes.finfo(kind).max)
  rows = np.pad(x, (0, -x.size % 32)).reshape(-1, 32).astype(np.float64)
  peak = np.abs(rows).max(1, keepdims=True)
  exponent = np.where(peak > 0, np.frexp(peak)[1] - 1 - EMAX[name], -127)
  scale = 2.0 ** np.maximum(exponent, -127)
  elements = np.clip(rows / scale, -most, most).astype(np.float32).astype(kind)
  y = elements.astype(np.float64) * scale
  return scale, y.reshape(-1)[: x.size].astype(np.float32)


def spread(size):
  """Values of many magnitudes, within a block and from block to block."""
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(-(-size // 32), 32)) * 2.0 ** rng.integers(
    -12, 3, (-(-size // 32), 32)
  )
  rows = rows * 2.0 ** rng.integers(-90, 120, (rows.shape[0], 1))
  return rows.reshape(-1)[:size].astype(np.float32)


@FORMATS
def test_elements_and_scales_are_those_of_the_specification(name):
  x = spread(3000)
  x[-24:] = [0.0, -0.0] * 12  # The last block stays zero, with its signs.
  payload, y = trip(name, x)
  assert payload.words.nbytes == 3008 * int(name[5]) // 8
  assert payload.scale.shape == (94,) and payload.scale.dtype == jnp.uint8
  scale, expected = oracle(name, x)
  found = 2.0 ** (np.asarray(payload.scale, np.float64) - 127)
  np.testing.assert_array_equal(found, scale[:, 0])
  np.testing.assert_array_equal(y, expected)
  np.testing.assert_array_equal(np.signbit(y), np.signbit(expected))


@FORMATS
def test_scales_are_exact_at_powers_of_two(name):
  powers = np.float32(2.0) ** np.float32([-126, -1, 0, 1, 127])
  for peak in (*powers, *np.nextafter(powers, np.float32(0))):
    x = np.full(32, peak, np.float32)
    payload, y = trip(name, x)
    if peak < np.finfo(np.float32).tiny:
      continue
    exponent = max(int(np.frexp(peak)[1]) - 1 - EMAX[name], -127)
    assert payload.scale.tolist() == [exponent + 127]
    np.testing.assert_array_equal(y, oracle(name, x)[1])


def test_values_without_a_mantissa_are_the_nearest_powers_of_two():
  """Against all sixteen values, in blocks with any greatest element."""
  x = spread(640)
  _, y = trip("float4_e3m0", x)
  rows = np.pad(x, (0, -x.size % 32)).reshape(-1, 32).astype(np.float64)
  peak = np.abs(rows).max(1, keepdims=True)
  binade = 2.0 ** np.floor(np.log2(peak))
  most = np.where(peak >= 1.5 * binade, 2 * binade, binade)
  powers = most[..., None] * 2.0 ** -np.arange(7.0)
  values = np.concatenate([0 * powers[..., :1], powers, -powers], axis=-1)
  gaps = np.abs(rows[..., None] - values)
  found = np.abs(rows - np.asarray(y, np.float64).reshape(rows.shape))
  np.testing.assert_allclose(found, gaps.min(-1), rtol=1e-6)
