import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, collectives
from jaxmotion.collectives.extend import (
  apply_nonfinite_policy,
  keep_update,
)
from tests.collectives.helpers import run

X = np.random.default_rng(3).normal(size=(4, 96)).astype(np.float32)
BAD = X.copy()
BAD[2, 7] = np.nan
CODEC = codecs.feedback(codecs.uniform(bits=4, block=32))


def exchange(x, policy):
  state = collectives.all_reduce_init(x, "data", CODEC)
  _, state = collectives.all_reduce(x * 0 + 0.3, "data", CODEC, state=state)

  x, ok = apply_nonfinite_policy(policy, x, "data")
  y, new = collectives.all_reduce(x, "data", CODEC, state=state)
  y, new = keep_update(ok, y, new, state)
  error = CODEC.error(new[0].first)
  changed = jnp.any(error != CODEC.error(state[0].first))
  finite = jnp.isfinite(error).all()
  return (
    y,
    jnp.array(True) if ok is None else ok,
    collectives.max_over_workers(changed.astype(jnp.int32), "data"),
    -collectives.max_over_workers(-finite.astype(jnp.int32), "data"),
  )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_skip_emits_zeros_and_leaves_every_workers_memory_alone(value):
  bad = X.copy()
  bad[2, 7] = value
  y, ok, changed, _ = run(lambda x: exchange(x, "skip"), bad, 4)
  assert not ok and not changed
  np.testing.assert_array_equal(y, 0)


def test_skip_changes_nothing_when_all_is_finite():
  y, ok, changed, _ = run(lambda x: exchange(x, "skip"), X, 4)
  plain, *_ = run(lambda x: exchange(x, "propagate"), X, 4)
  assert ok and changed
  np.testing.assert_array_equal(y, plain)


def test_propagate_reaches_every_worker_and_spares_the_memory():
  y, ok, _, finite = run(lambda x: exchange(x, "propagate"), BAD, 4)
  assert ok and finite
  assert np.isnan(np.asarray(y)[7])
  assert np.isfinite(np.asarray(y)[32:]).all()


def test_zero_drops_the_element_and_nothing_else():
  y, ok, _, finite = run(lambda x: exchange(x, "zero"), BAD, 4)
  cleaned = np.where(np.isfinite(BAD), BAD, 0)
  expected, *_ = run(lambda x: exchange(x, "propagate"), cleaned, 4)
  assert ok and finite
  np.testing.assert_array_equal(y, expected)
