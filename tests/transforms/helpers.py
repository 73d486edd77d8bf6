"""Training with an exchange, on real (emulated) workers."""

import jax
import numpy as np

import jaxmotion
from tests.compilations import compilations


def train(loss, tx, mesh, params, batch, *, axis_name="data", steps=4, **extra):
  """Trains some steps: (params, state, losses). Only the first compiles."""
  init, step = jaxmotion.make_train_step(loss, tx, mesh, axis_name=axis_name)
  state = init(params)
  losses = []
  for i in range(steps):
    before = compilations()
    state, value = step(state, batch, **extra)
    # Tracing may compile operations of its own the first time.
    assert i == 0 or compilations() == before
    losses.append(float(value))
  return state.params, state.opt_state, losses


def bits(tree):
  return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def assert_close(found, expected, rtol=1e-7, atol=1e-6):
  """Compares the leaves of two trees, which may have other nodes."""
  leaves = map(jax.tree.leaves, (found, expected))
  for a, b in zip(*leaves, strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_same(found, expected):
  """Compares trees, values and where they are."""
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
