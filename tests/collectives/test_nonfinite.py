import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmotion import codecs, collectives
from jaxmotion.collectives.extend import (
  apply_nonfinite_policy,
  keep_update,
)
from tests.collectives.helpers import over

X = np.random.default_rng(3).normal(size=(4, 96)).astype(np.float32)
CODEC = codecs.feedback(codecs.uniform(bits=4, block=32))


def exchange(x, policy):
  """The update, whether it is kept, and whether memory changed, is finite."""
  reduce = collectives.all_reduce
  state = collectives.all_reduce_init(x, "data", CODEC)
  _, state = reduce(x * 0 + 0.3, "data", CODEC, state=state)
  x, ok = apply_nonfinite_policy(policy, x, "data")
  y, new = reduce(x, "data", CODEC, state=state)
  y, new = keep_update(ok, y, new, state)
  error, before = (CODEC.error(s[0].first) for s in (new, state))
  facts = jnp.stack([jnp.any(error != before), ~jnp.isfinite(error).all()])
  changed, bad = lax.pmax(facts.astype(jnp.int32), "data")
  return y, jnp.array(True) if ok is None else ok, changed > 0, bad == 0


POLICIES = "skip", "propagate", "zero"
program = over(lambda x: {p: exchange(x, p) for p in POLICIES}, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_policies_are_kept_where_one_worker_has_a_bad_element(value):
  bad = X.copy()
  bad[2, 7] = value
  found = program(bad)
  y, ok, changed, _ = found["skip"]
  assert not ok and not changed
  np.testing.assert_array_equal(y, 0)
  # It reaches every worker and spares the memory.
  y, ok, _, finite = found["propagate"]
  assert ok and finite and not np.isfinite(np.asarray(y)[7])
  assert np.isfinite(np.asarray(y)[32:]).all()
  # The element is dropped and nothing else.
  y, ok, _, finite = found["zero"]
  cleaned = np.where(np.isfinite(bad), bad, 0)
  assert ok and finite
  np.testing.assert_array_equal(y, program(cleaned)["propagate"][0])


def test_no_policy_changes_what_is_finite():
  found = program(X)
  for y, ok, changed, finite in found.values():
    assert ok and changed and finite
    np.testing.assert_array_equal(y, found["propagate"][0])
