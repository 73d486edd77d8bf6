import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import models
from experiments.residuals import measure, streamed
from jaxmotion import codecs

PLAIN = {"weights": codecs.identity(), "grads": codecs.identity()}


def make_tiny(repeats=5):
  return models.make_network("tiny", repeats=repeats)


@pytest.fixture(scope="module")
def batch():
  rng = np.random.default_rng(0)
  inputs, labels = make_tiny().batch(4)
  return (
    jnp.asarray(rng.normal(size=inputs.shape), jnp.float32),
    jnp.asarray(rng.integers(0, 10, labels.shape), jnp.int32),
  )


@pytest.fixture(scope="module")
def params():
  return make_tiny().init(jax.random.key(0))


@pytest.fixture(scope="module")
def expected(params, batch):
  """The loss, and the parameters after a step of gradient descent."""
  loss, grads = jax.jit(jax.value_and_grad(make_tiny().loss))(params, batch)
  updates = jax.tree.map(lambda g: -0.1 * g, grads)
  return loss, optax.apply_updates(params, updates)


@pytest.mark.parametrize("segment", [1, 2, 64])
def test_a_step_in_segments_is_the_step_of_the_whole(
  segment, params, batch, expected
):
  net = make_tiny()
  model = streamed.make_streamed_model(net, segment, None, **PLAIN)
  state = model.init(streamed.split_params(net, params, segment))
  state, loss = model.step(state, batch)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4),
    state.params,
    streamed.split_params(net, expected[1], segment),
  )


def test_it_learns_with_weights_gradients_and_inputs_in_8_bits(params, batch):
  net = make_tiny()
  model = streamed.make_streamed_model(net, 2)
  state = model.init(streamed.split_params(net, params, 2))
  losses = []
  for _ in range(16):
    state, loss = model.step(state, batch)
    losses.append(float(loss))
  assert losses[-1] < 0.5 * losses[0]


def test_a_deeper_network_adds_the_inputs_of_its_segments_to_the_device():
  shallow, deep = (
    streamed.compile_step(make_tiny(n), 4, "cpu") for n in (129, 257)
  )
  # Two more segments of 64 blocks, whose inputs are 8 x 8 pixels of 8 channels.
  assert deep.device_bytes - shallow.device_bytes == 2 * (4 * 4 * 8 * 8 * 8)
  assert deep.host_temp_bytes > 1.9 * shallow.host_temp_bytes
  assert isinstance(shallow, measure.StepMemory)
