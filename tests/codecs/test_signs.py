"""Codecs of signs, of two levels and of three."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, testing
from jaxmotion.codecs import sign, ternary
from jaxmotion.core import make_key
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


RNG = np.random.default_rng(0)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_majority_decides_and_a_tie_is_zero(workers):
  xs = RNG.integers(-2, 3, size=(workers, 5, 16)).astype(np.float32)
  codec = codecs.vote()

  @jax.jit
  def run(xs):
    payloads = jax.vmap(lambda x: codec.encode(x)[0])(xs)
    second, _ = codec.encode_mean(payloads, xs[0])
    return (
      codec.sum_decoded(payloads, xs[0]) / workers,
      codec.decode(second, xs[0]),
    )

  expected = np.sign(np.sign(xs).sum(0))
  for found in run(xs):
    np.testing.assert_array_equal(found, expected)


def test_votes_of_one_bit_keep_the_laws_and_count_zeros_as_positive():
  rows = testing.make_rows(RNG.normal(size=65).astype(np.float32))
  assert testing.find_breaches(codecs.vote(codecs.sign(block=64)), rows) == []
  _, y = trip(codecs.vote(codecs.sign()), np.float32([0, -2, 3]))
  assert y.tolist() == [1, -1, 1]


def test_codecs_that_lose_signs_are_refused():
  for codec in (codecs.uniform(bits=2), codecs.ternary()):
    with pytest.raises(ValueError, match="`codec` must keep signs"):
      codecs.vote(codec)
