import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.codecs import ternary
from jaxmotion.core import make_key
from tests.codecs.jitted import normal, trip


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
  drawn = [trip(ternary(), x, make_key(0, w))[1] for w in range(20)]
  assert (drawn[0] != drawn[1]).any()
  for y in drawn:
    assert (y[x == 0] == 0).all()
    assert (y * x >= 0).all()
    assert y[np.abs(x).argmax()] == x[np.abs(x).argmax()]


def test_threshold_takes_the_mean_of_what_is_above():
  # Two blocks of one plane: 20 planes of two values, one value a block.
  x = normal(40, seed=1)
  _, y = trip(ternary(rounding="threshold"), x)
  above = np.abs(x) > 0.7 * np.abs(x).mean()
  scale = np.abs(x)[above].mean()
  expected = np.where(above, np.sign(x) * scale, 0)
  np.testing.assert_allclose(y, expected, rtol=40 * 2**-24)


def test_threshold_ignores_padding():
  # 1999 values leave padding in the last of 20 planes of 100.
  x = np.zeros(1999, np.float32)
  x[-1] = 8.0
  _, y = trip(ternary(block=100, rounding="threshold"), x)
  np.testing.assert_array_equal(y, x)
