"""Codecs whose levels follow the distribution of the elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from tests.codecs.jitted import trip

RNG = np.random.default_rng(0)


def reference(x, bins, span):
  """The quantizer as its authors' code has it, in float64."""
  mean = x.mean()
  c = x - mean
  width = span * np.sqrt((c * c).sum() / (x.size - 1)) / bins
  q = np.clip(np.rint(c / width + bins // 2), 0, bins - 1).astype(int)
  masks = [q == b for b in range(bins)]
  levels = np.array([c[m].mean() if m.any() else 0 for m in masks])
  return levels[q] + mean


@pytest.mark.parametrize(("bits", "span"), [(2, 6.0), (5, 3.0)])
def test_levels_are_means_of_the_elements_of_their_bins(bits, span):
  x = RNG.normal(1.0, 2.0, size=200).astype(np.float32)
  _, y = trip(codecs.codebook(bits=bits, span=span), x)
  expected = reference(x.astype(np.float64), 2**bits, span)
  np.testing.assert_allclose(y, expected, atol=1e-5)


def test_few_elements_and_equal_ones_come_back():
  codec = codecs.codebook(bits=2)
  arrays = [
    jnp.asarray(x, jnp.float32)
    for x in ([1.0, -1.0], [3.0, 3.0, 3.0], [5.0], [], [0.0, 0.0])
  ]
  found = jax.jit(lambda xs: [codec.decode(codec.encode(x)[0], x) for x in xs])
  for x, y in zip(arrays, found(arrays), strict=True):
    np.testing.assert_allclose(y, x, atol=1e-6)


def test_bins_that_hold_all_elements_make_no_error_memory():
  with pytest.raises(ValueError, match="`codec` must bound the error memory"):
    codecs.feedback(codecs.codebook(bits=2, span=50.0))


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
