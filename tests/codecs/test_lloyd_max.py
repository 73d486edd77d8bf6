import numpy as np
import pytest

from jaxmotion import codecs
from tests.codecs.jitted import trip

RNG = np.random.default_rng(0)


def relative_error(codec, x):
  _, y = trip(codec, x)
  return np.linalg.norm(y - x) / np.linalg.norm(x)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_is_that_of_the_best_levels(bits):
  """Of blocks that are normally distributed, or are after a rotation."""
  rows = RNG.normal(size=128 * 64).astype(np.float32)
  best = {2: 0.1175, 3: 0.03454, 4: 0.009497}[bits] ** 0.5
  found = relative_error(codecs.lloyd_max(bits=bits), rows)
  assert abs(found / best - 1) < 0.05
  heavy = (rows**5).astype(np.float32)
  rotated = codecs.chain(codecs.rotate(), codecs.lloyd_max(bits=bits))
  assert relative_error(rotated, heavy) < 1.15 * best
  uniform = codecs.uniform(bits=bits, block=128)
  assert relative_error(uniform, rows) > 1.15 * best


def test_one_bit_is_the_mean_magnitude():
  x = RNG.normal(size=256).astype(np.float32)
  _, y = trip(codecs.lloyd_max(bits=1, block=256), x)
  np.testing.assert_allclose(y, np.sign(x) * np.abs(x).mean(), rtol=1e-5)
