"""Codecs that reduce in several rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, testing
from jaxmotion.codecs._combinators._multi_round import orthonormalize
from jaxmotion.testing._codec import _answer_rounds
from tests.codecs.jitted import normal, trip

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


def test_it_approaches_the_mean_of_arrays_that_stay_the_same():
  means, states = reduce_many(codecs.ef21(codecs.low_rank(rank=2)), XS, 24)
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


A = RNG.normal(size=(48, 3)).astype(np.float32)
COLUMNS = {
  "ordinary": A,
  "zero": A * 0,
  "of rank 1": np.outer(A[:, 0], [1, 2, 3]).astype(np.float32),
  "nearly of rank 1": A @ np.diag(np.float32([1, 0, 0])) + A * np.float32(1e-4),
  "huge": A * np.float32(1e25),
  "tiny": A * np.float32(1e-30),
  "zero in one column": A * np.float32([1, 0, 1]),
  "NaN": np.where(np.eye(48, 3) > 0, np.float32(np.nan), A),
  "infinite": np.where(np.eye(48, 3, -5) > 0, np.float32(np.inf), A),
}


def test_columns_are_orthonormal_whatever_they_were():
  spare = RNG.normal(size=A.shape).astype(np.float32)
  stack = np.stack(list(COLUMNS.values()))
  found = jax.jit(jax.vmap(lambda a: orthonormalize(a, spare)))(stack)
  for name, q in zip(COLUMNS, np.asarray(found, np.float64), strict=True):
    np.testing.assert_allclose(q.T @ q, np.eye(3), atol=3e-7, err_msg=name)
  # Ordinary columns are those of QR, but for signs.
  expected = np.linalg.qr(A.astype(np.float64))[0]
  expected *= np.sign(np.sum(expected * A, axis=0))
  for name in ("ordinary", "tiny", "huge"):
    got = found[list(COLUMNS).index(name)]
    np.testing.assert_allclose(got, expected, atol=1e-6, err_msg=name)


def test_at_full_rank_nothing_is_lost():
  xs = [normal(*s) for s in ((6, 5), (2, 3, 4), (7,), (), (0, 3))]
  codec = codecs.low_rank(rank=9)
  trip = lambda x: codec.decode(codec.encode(x, codec.init(x))[0], x)
  for x, y in zip(xs, jax.jit(lambda xs: list(map(trip, xs)))(xs), strict=True):
    np.testing.assert_allclose(y, x, atol=1e-5)


def test_the_power_iteration_survives_what_is_not_finite_or_zero():
  """The next finite gradient is approximated as if nothing had been."""
  codec = codecs.feedback(codecs.low_rank(rank=2))
  x = RNG.normal(size=(6, 5)).astype(np.float32)
  rank_2 = np.float32(np.outer(x[:, 0], x[0]) + np.outer(x[:, 1], x[1]))
  step = jax.jit(codec.encode)
  for bad in (0 * x, x * np.float32(1e25), np.where(x > 1, np.inf, x)):
    _, state = step(bad, codec.init(x))
    assert np.isfinite(np.asarray(state.inner.value)).all()
    assert np.linalg.matrix_rank(state.inner.value) == 2
    # The error of what was huge is added: compare once it is sent.
    for _ in range(3):
      payload, state = step(rank_2, state)
    error = codec.codec.decode(payload, x) - rank_2
    assert np.isfinite(np.asarray(error)).all()
    if np.abs(bad).max() < 1e20:
      np.testing.assert_allclose(error, 0, atol=1e-3)


def test_views_are_matrices_of_the_first_or_of_the_last_dimension():
  x = normal(4, 3, 5)
  for view, shape in [("first", (4, 15)), ("last", (12, 5))]:
    codec = codecs.low_rank(rank=2, view=view)
    payload, y = trip(codec, x)
    assert [a.shape for a in payload] == [(n, 2) for n in shape]
    expected, z = trip(codec, x.reshape(shape))
    np.testing.assert_array_equal(payload.left, expected.left)
    np.testing.assert_array_equal(y.reshape(shape), z)


@pytest.mark.parametrize(
  "codec",
  [
    codecs.onebit(),
    # In a chain it has the state of its workers.
    codecs.chain(codecs.rotate(block=32), codecs.onebit()),
  ],
)
def test_the_laws_of_rounds_hold(codec):
  testing.check_rounds(codec, jnp.asarray(normal(3, 7, 9)))
