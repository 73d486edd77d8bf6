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
  return jax.jit(make_tiny().init)(jax.random.key(0))


@pytest.fixture(scope="module")
def expected(params, batch):
  """The loss, and the parameters after a step of gradient descent."""
  loss, grads = jax.jit(jax.value_and_grad(make_tiny().loss))(params, batch)
  updates = jax.tree.map(lambda g: -0.1 * g, grads)
  return loss, optax.apply_updates(params, updates)


@pytest.mark.parametrize(
  ("segment", "options", "most"),
  [
    # Two segments of two repeats and one of one; a segment of all.
    (2, {"codec": None, **PLAIN}, 1e-3),
    (64, {"codec": None, **PLAIN}, 1e-3),
    (2, {}, 0.2),  # Weights, gradients and inputs in 8 bits.
  ],
  ids=["2", "64", "8 bits"],
)
def test_a_step_in_segments_is_the_step_of_the_whole(
  segment, options, most, params, batch, expected
):
  net = make_tiny()
  model = streamed.make_streamed_model(net, segment, **options)
  start, wanted = (
    streamed.split_params(net, tree, segment) for tree in (params, expected[1])
  )
  state, loss = model.step(model.init(start), batch)
  np.testing.assert_allclose(loss, expected[0], rtol=most / 100)
  start, wanted, found = (
    np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])
    for tree in (start, wanted, state.params)
  )
  error = np.linalg.norm(found - wanted)
  assert error < most * np.linalg.norm(wanted - start)


def test_a_deeper_network_adds_the_inputs_of_its_segments_to_the_device():
  shallow, deep = (
    streamed.compile_step(make_tiny(n), 4, "cpu") for n in (129, 257)
  )
  # Two more segments of 64 blocks, whose inputs are 8 x 8 pixels of 8 channels.
  assert deep.device_bytes - shallow.device_bytes == 2 * (4 * 4 * 8 * 8 * 8)
  assert deep.host_temp_bytes > 1.9 * shallow.host_temp_bytes
  assert isinstance(shallow, measure.StepMemory)
