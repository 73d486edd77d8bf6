import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.codecs import ternary
from jaxmotion.core import make_key
from jaxmotion.testing import check_unbiased
from tests.codecs.jitted import normal, trip

THRESHOLD = ternary(block=50, rounding="threshold")


def decoded(codec, x, key=None):
  return trip(codec, x, key)[1]


def test_stochastic_is_unbiased():
  check_unbiased(ternary(block=40), jnp.asarray(normal(30, 9, seed=1)))


def test_stochastic_variance_is_the_stated_one():
  x = normal(40, seed=1)
  codec, draws = ternary(), 4000

  def once(i):
    return codec.decode(codec.encode(x, (), make_key(0, i))[0], x)

  drawn = np.asarray(jax.jit(jax.vmap(once))(jnp.arange(draws)))
  s = np.abs(x).max()
  assert np.isin(np.abs(drawn), [0, s]).all()
  chance = np.abs(x) / s
  nonzero = (drawn != 0).mean(0)
  spread = np.sqrt(chance * (1 - chance) / draws)
  assert (np.abs(nonzero - chance) <= 5 * spread + 2**-23).all()


def test_stochastic_keeps_signs_zeros_and_the_peak():
  x = normal(200, seed=1)
  x[::3] = 0
  for worker in range(20):
    y = decoded(ternary(), x, make_key(0, worker))
    assert (y[x == 0] == 0).all()
    assert (y * x >= 0).all()
    assert y[np.abs(x).argmax()] == x[np.abs(x).argmax()]


def test_workers_round_apart():
  x = normal(200, seed=1)
  a, b = (decoded(ternary(), x, make_key(0, w)) for w in (0, 1))
  assert (a != b).any()


def test_threshold_takes_the_mean_of_what_is_above():
  # Two blocks of one plane: 20 planes of two values, one value a block.
  x = normal(40, seed=1)
  y = decoded(ternary(rounding="threshold"), x)
  above = np.abs(x) > 0.7 * np.abs(x).mean()
  scale = np.abs(x)[above].mean()
  expected = np.where(above, np.sign(x) * scale, 0)
  np.testing.assert_allclose(y, expected, rtol=40 * 2**-24)


@pytest.mark.parametrize("size", [7, 50, 51, 1999])
def test_threshold_leaves_what_its_law_says(size):
  x = normal(size, seed=1)
  y = decoded(THRESHOLD, x).astype(np.float64)
  left = ((x - y) ** 2).sum()
  # N s^2 of every block is the energy of what was sent.
  expected = (x.astype(np.float64) ** 2).sum() - (y**2).sum()
  np.testing.assert_allclose(left, expected, rtol=1e-5)
  assert left < (1 - 0.09 / 50) * (x.astype(np.float64) ** 2).sum()


def test_threshold_ignores_padding():
  # 1999 values leave padding in the last of 20 planes of 100.
  x = np.zeros(1999, np.float32)
  x[-1] = 8.0
  np.testing.assert_array_equal(
    decoded(ternary(block=100, rounding="threshold"), x), x
  )


@pytest.mark.parametrize("codec", [ternary(block=20), THRESHOLD])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_makes_its_whole_block_nan(codec, bad):
  x = normal(2000, seed=1)
  x[1000] = bad
  y = decoded(codec, x, make_key(0))
  # 20 planes of 100 values, in blocks of `block`.
  start = 1000 // codec.block * codec.block
  nan = np.zeros(2000, bool)
  nan[start : start + codec.block] = True
  np.testing.assert_array_equal(np.isnan(y), nan)


def test_a_code_takes_1_6_bits():
  x = jax.ShapeDtypeStruct((20_000,), jnp.float32)
  payload, _ = jax.eval_shape(THRESHOLD.encode, x)
  assert payload.words.size * 32 == 20_000 * 1.6
