import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs
from jaxmotion.testing import check_transform

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12)}
SGD = optax.sgd(0.01)


def after_pmean(update, init=lambda params: ()):
  """Returns a transformation of the exchanged gradients."""
  pmean = optax.GradientTransformation(
    lambda _: (),
    lambda g, s, p=None: (
      jax.tree.map(lambda a: lax.pmean(a, "data"), g),
      s,
    ),
  )
  return optax.chain(pmean, optax.GradientTransformation(init, update), SGD)


@pytest.mark.parametrize(
  "codec",
  [None, codecs.feedback(codecs.uniform(bits=4, rounding="stochastic"))],
)
def test_an_exchange_passes(codec):
  check_transform(
    optax.chain(jaxmotion.exchange("data", codec), SGD), MESH, PARAMS, steps=2
  )


def test_extra_arguments_reach_the_chain():
  tx = optax.chain(jaxmotion.exchange("data"), SGD)
  check_transform(tx, MESH, PARAMS, steps=2, weight=jnp.float32(1.0))
  ladder = [codecs.uniform(bits=b) for b in (4, 8)]
  tx = optax.chain(jaxmotion.exchange("data", ladder), SGD)
  with pytest.raises(ValueError, match="`level` must be given"):
    check_transform(tx, MESH, PARAMS, steps=2)


def test_a_chain_without_an_exchange_is_caught():
  with pytest.raises(ValueError, match="`tx` must exchange"):
    check_transform(SGD, MESH, PARAMS, steps=1)


def test_an_update_of_each_workers_own_is_caught():
  def update(g, s, params=None):
    own = lax.axis_index("data").astype(jnp.float32)
    return jax.tree.map(lambda a: a + own, g), s

  with pytest.raises(ValueError, match="`tx` must exchange"):
    check_transform(after_pmean(update), MESH, PARAMS, steps=1)


def test_a_parameter_that_is_not_finite_is_caught():
  def update(g, s, params=None):
    return jax.tree.map(lambda a: a / 0.0, g), s

  with pytest.raises(AssertionError, match="a parameter is not finite"):
    check_transform(after_pmean(update), MESH, PARAMS, steps=2)


def test_a_state_that_changes_its_dtype_is_caught():
  def update(g, s, params=None):
    return g, s + jnp.float32(0.5)

  tx = after_pmean(update, lambda params: jnp.zeros((), jnp.int32))
  with pytest.raises(AssertionError, match="traced 2 times|the state changed"):
    check_transform(tx, MESH, PARAMS, steps=2)


def test_a_state_that_holds_one_array_twice_is_caught():
  def hold_twice(params):
    zero = jnp.zeros(())
    return {"count": zero, "skipped": zero}

  tx = after_pmean(lambda g, s, params=None: (g, s), hold_twice)
  with pytest.raises(AssertionError, match="holds one array twice"):
    check_transform(tx, MESH, PARAMS, steps=1)
