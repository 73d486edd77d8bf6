import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import make_key
from jaxmotion.codecs import nonnegative
from tests.codecs import jitted

NEAREST = nonnegative(block=64)
STOCHASTIC = nonnegative(block=64, rounding="stochastic")
WIDE = nonnegative(block=64, bits=16, rounding="stochastic")
BOTH = pytest.mark.parametrize("codec", [NEAREST, STOCHASTIC], ids=repr)


def trip(codec, x):
  return jitted.trip(codec, x, make_key(0))[1]


def spread(binades, size=640, least=0):
  """Values all over so many binades, in every block of 64."""
  rng = np.random.default_rng(0)
  x = 2.0 ** rng.uniform(least, least + binades, size)
  x[::64] = 2.0 ** (least + binades)
  return x.astype(np.float32)


@BOTH
def test_values_of_thirty_binades_are_within_the_stated_bound(codec):
  for least in (-125, -40, 96):
    x = spread(30, least=least)
    error = np.abs(trip(codec, x) - x) / x
    assert error.max() <= (1 / 8 if codec.needs_key else 1 / 16) * (1 + 1e-6)
    assert error.max() > 1 / 20


def test_sixteen_bits_round_by_a_256th_of_that():
  x = spread(30)
  error = np.abs(trip(nonnegative(block=64, bits=16), x) - x) / x
  assert 2**-13 < error.max() <= 2**-12 * (1 + 1e-6)
  payload, y = jitted.trip(WIDE, x, make_key(0))
  assert np.abs(y - x).max() > 0
  assert sum(a.nbytes for a in payload) == 2 * 640 + 10


@BOTH
@pytest.mark.parametrize("least", [-149, -60])
def test_nothing_above_zero_decodes_to_zero(codec, least):
  x = spread(100, least=least)
  x[3::5] = 0
  y = trip(codec, x)
  np.testing.assert_array_equal(y > 0, x > 0)
  # Not even in arithmetic, where subnormal numbers are none.
  assert y[x > 0].min() >= np.finfo(np.float32).tiny
  # What is too small for its block is rounded up to one level.
  block = slice(0, 64)
  low = y[block][(x[block] > 0) & (x[block] < 2.0 ** (least + 60))]
  assert len(low) and (low == low[0]).all() and (low > x[block].min()).all()


@BOTH
def test_negative_values_count_as_zero(codec):
  y = trip(codec, np.float32([-1, 1, -0.0, -1e30]))
  np.testing.assert_array_equal(y, [0, 1, 0, 0])
  # The greatest float stays finite.
  y = trip(codec, np.float32([np.finfo(np.float32).max, 1.0]))
  assert y[0] == 1.875 * 2.0**127
  # A block of small values has no subnormal level.
  y = trip(codec, np.float32([2.0**-110, 1e-40]))
  assert y.min() >= np.finfo(np.float32).tiny


def average(codec, start, square, steps=4000):
  """Returns second moments after some steps, encoded after each."""
  x = jnp.full((256,), start, jnp.float32)

  def step(i, v):
    v = 0.999 * v + 0.001 * square
    payload, _ = codec.encode(v, key=make_key(i))
    return codec.decode(payload, v)

  return np.asarray(jax.jit(lambda v: jax.lax.fori_loop(0, steps, step, v))(x))


@pytest.mark.parametrize("square", [0.3, 3.0])
def test_an_average_that_moves_by_less_than_a_level_moves(square):
  exact = square + (1 - square) * 0.999**4000
  found = np.mean(average(STOCHASTIC, 1.0, square))
  assert found == pytest.approx(exact, rel=0.1)
  # To nearest it is stuck where it was, even at the end of a binade.
  np.testing.assert_array_equal(average(NEAREST, 1.0, square), 1.0)
  np.testing.assert_array_equal(average(NEAREST, 1.875, 2.0), 1.875)
