"""Checks of gradient transformations find what breaks them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs
from jaxmotion.testing import check_sharded, check_transform

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12)}
SGD = optax.sgd(0.01)


def after_pmean(update, init=lambda params: ()):
  """Returns a transformation of the exchanged gradients."""
  pmean = optax.GradientTransformation(
    lambda _: (),
    lambda g, s, p=None: (jax.tree.map(lambda a: lax.pmean(a, "data"), g), s),
  )
  return optax.chain(pmean, optax.GradientTransformation(init, update), SGD)


@pytest.mark.parametrize(
  "codec",
  [None, codecs.feedback(codecs.uniform(bits=4, rounding="stochastic"))],
)
def test_an_exchange_passes(codec):
  tx = optax.chain(jaxmotion.exchange("data", codec), SGD)
  check_transform(tx, MESH, PARAMS, steps=2)


def test_extra_arguments_reach_the_chain():
  tx = optax.chain(jaxmotion.exchange("data"), SGD)
  check_transform(tx, MESH, PARAMS, steps=2, weight=jnp.float32(1.0))
  ladder = [codecs.uniform(bits=b) for b in (4, 8)]
  tx = optax.chain(jaxmotion.exchange("data", ladder), SGD)
  with pytest.raises(ValueError, match="`level` must be given"):
    check_transform(tx, MESH, PARAMS, steps=2)


def change(fn):
  """Returns a transformation that changes each gradient."""
  return after_pmean(lambda g, s, params=None: (jax.tree.map(fn, g), s))


def add_half(g, s, params=None):
  return g, s + jnp.float32(0.5)


def keep(g, s, params=None):
  return g, s


CAUGHT = {
  "no exchange": (SGD, ValueError, "`tx` must exchange"),
  "an update of each worker's own": (
    change(lambda a: a + lax.axis_index("data").astype(jnp.float32)),
    ValueError,
    "`tx` must exchange",
  ),
  "not finite": (
    change(lambda a: a / 0.0),
    AssertionError,
    "a parameter is not finite",
  ),
  "another dtype": (
    after_pmean(add_half, lambda params: jnp.zeros((), jnp.int32)),
    AssertionError,
    "traced 2 times|the state changed",
  ),
  "one array twice": (
    after_pmean(keep, lambda params: [jnp.zeros(())] * 2),
    AssertionError,
    "holds one array twice",
  ),
}


@pytest.mark.parametrize("case", CAUGHT)
def test_what_breaks_a_step_is_caught(case):
  tx, error, message = CAUGHT[case]
  with pytest.raises(error, match=message):
    check_transform(tx, MESH, PARAMS, steps=2)


PAIR = Mesh(np.array(jax.devices()[:2]), ("data",))
LEAVES = {"w": np.ones((16, 16), np.float32), "b": np.ones(3, np.float32)}


def test_an_optimizer_of_single_elements_passes_on_several_workers():
  check_sharded(optax.adamw(1e-2), PAIR, LEAVES)
  with pytest.raises(ValueError, match="`mesh` must have at least 2 workers"):
    check_sharded(optax.sgd(0.1), Mesh(jax.devices()[:1], ("data",)), LEAVES)


def test_noise_that_is_drawn_for_a_leaf_is_found():
  tx = optax.add_noise(1.0, 0.5, key=jax.random.key(0))
  with pytest.raises(AssertionError, match="`w`: the update of step 0"):
    check_sharded(tx, PAIR, LEAVES, steps=1)
