"""The presets `lion` and `signum` vote, and are what they are of one worker."""

import jax
import numpy as np
import optax
import pytest

from jaxmotion import presets
from tests.presets.reference import PARAMS, gradients, make_run, pick


def with_zeros(step):
  """Gradients whose every third element is zero."""
  grads = pick(gradients(step))
  for a in grads.values():
    a.reshape(4, -1)[:, ::3] = 0
  return grads


def lion(step, mu, b1=0.9, b2=0.99):
  """Signs that the majority has, and the new momenta."""
  grads = with_zeros(step)
  votes = jax.tree.map(lambda m, g: np.sign(b1 * m + (1 - b1) * g), mu, grads)
  mu = jax.tree.map(lambda m, g: b2 * m + (1 - b2) * g, mu, grads)
  return jax.tree.map(lambda a: np.sign(a.sum(0)), votes), mu


def signum(step, mu):
  mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, with_zeros(step))
  return jax.tree.map(lambda a: np.sign(np.sign(a).sum(0)), mu), mu


@pytest.mark.parametrize("name", ["lion", "signum"])
def test_updates_are_the_signs_of_most_workers_momenta(name):
  tx = getattr(presets, name)("data", 0.5, weight_decay=0.1)
  ones = jax.tree.map(np.ones_like, pick(PARAMS))
  state, update = make_run(tx, ones)
  mu = jax.tree.map(lambda a: np.zeros_like(a, np.float64), with_zeros(0))
  for step in range(3):
    updates, state = update(with_zeros(step), state)
    signs, mu = {"lion": lion, "signum": signum}[name](step, mu)
    for key, found in updates.items():
      np.testing.assert_allclose(found, -0.5 * (signs[key] + 0.1), rtol=1e-6)


def test_lion_of_equal_workers_is_that_of_optax():
  ones = jax.tree.map(np.ones_like, pick(PARAMS))
  state, update = make_run(presets.lion("data", 0.5), ones)
  plain = optax.lion(0.5)
  expected_state = plain.init(ones)
  for step in range(2):
    own = jax.tree.map(lambda a: a[0], with_zeros(step))
    same = jax.tree.map(lambda a: np.stack([a] * 4), own)
    updates, state = update(same, state)
    expected, expected_state = plain.update(own, expected_state, ones)
    for key, found in updates.items():
      np.testing.assert_allclose(found, expected[key], rtol=1e-6)
