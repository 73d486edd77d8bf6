import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, testing
from jaxmotion.testing._codec import _answer_rounds

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(3, 6, 8)).astype(np.float32)


def reduce_many(codec, xs, steps):
  """Means of the workers' arrays, which stay the same, and their states."""

  @jax.jit
  def step(states):
    done = _answer_rounds(
      codec,
      [
        codec.reduce_in_rounds(x, s, None, len(xs))
        for x, s in zip(xs, states, strict=True)
      ],
    )
    return done[0].mean, [d.state for d in done]

  states, means = [codec.init(xs[0])] * len(xs), []
  for _ in range(steps):
    mean, states = step(states)
    means.append(np.asarray(mean))
  return means, states


@pytest.mark.parametrize(
  "inner", [codecs.topk(density=0.25), codecs.low_rank(rank=2)]
)
def test_it_approaches_the_mean_of_arrays_that_stay_the_same(inner):
  means, states = reduce_many(codecs.ef21(inner), XS, 24)
  exact = XS.mean(0)
  gaps = [np.abs(mean - exact).max() for mean in means]
  assert gaps[0] > 0.3 and gaps[-1] < 1e-3
  # The mean is that of what workers have sent, always.
  np.testing.assert_allclose(
    np.mean([s.own for s in states], axis=0), states[0].mean.value, atol=1e-6
  )


def test_what_is_not_finite_reaches_the_result_and_not_the_state():
  bad = XS.copy()
  bad[1, 2, 3] = np.nan
  codec = codecs.ef21(codecs.identity())
  means, states = reduce_many(codec, bad, 1)
  assert np.isnan(means[0]).sum() == 1
  for state in states:
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(state))
  np.testing.assert_allclose(
    np.mean([s.own for s in states], axis=0), states[0].mean.value, atol=1e-6
  )


def test_the_laws_of_rounds_hold_for_contractions_without_error_memory():
  contributors = codecs.contributors(codecs.topk(density=0.1))
  for inner in (codecs.ternary(), codecs.vote(), contributors):
    with pytest.raises(ValueError, match="`codec` must"):
      codecs.ef21(inner)
  with pytest.raises(ValueError, match="`codec` must bound the error memory"):
    codecs.feedback(codecs.ef21(codecs.sign()))
  testing.check_rounds(codecs.ef21(codecs.topk(density=0.25)), jnp.asarray(XS))
