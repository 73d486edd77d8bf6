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
