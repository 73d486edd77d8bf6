import jax
import numpy as np
import pytest

from jaxmotion import codecs, testing
from tests.codecs.jitted import trip

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
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
