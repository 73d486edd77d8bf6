import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import models
from experiments.residuals import measure, streamed
from jaxmotion import codecs

PLAIN = {"weights": codecs.identity(), "grads": codecs.identity()}


def tiny(blocks=(1, 3, 6, 1)):
  return models.make_network(
    "resnet", blocks=blocks, image=32, classes=10, width=1 / 16
  )


def batch_of(net):
  rng = np.random.default_rng(0)
  inputs, labels = net.batch(4)
  return (
    jnp.asarray(rng.normal(size=inputs.shape), jnp.float32),
    jnp.asarray(rng.integers(0, 10, labels.shape), jnp.int32),
  )


@pytest.mark.parametrize("segment", [1, 2, 64])
def test_a_step_in_segments_is_the_step_of_the_whole(segment):
  net = tiny()
  params, batch = net.init(jax.random.key(0)), batch_of(net)
  loss, grads = jax.jit(jax.value_and_grad(net.loss))(params, batch)
  expected = optax.apply_updates(
    params, jax.tree.map(lambda g: -0.1 * g, grads)
  )

  model = streamed.streamed(net, segment, None, **PLAIN)
  state = model.init(streamed.split(net, params, segment))
  state, ours = model.step(state, batch)
  np.testing.assert_allclose(ours, loss, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-4),
    state.params,
    streamed.split(net, expected, segment),
  )


def test_it_learns_with_all_of_it_in_8_bits():
  net = tiny()
  model = streamed.streamed(net, 2)
  batch = batch_of(net)
  state = model.init(streamed.split(net, net.init(jax.random.key(0)), 2))
  losses = []
  for _ in range(8):
    state, loss = model.step(state, batch)
    losses.append(float(loss))
  assert losses[-1] < 0.5 * losses[0]


def test_the_device_takes_the_inputs_of_segments_more_where_it_is_deeper():
  shallow, deep = (
    streamed.compile_step(tiny((1, n, n, 1)), 4, "cpu") for n in (129, 257)
  )
  inputs = [4 * 4 * size * size * 4 * few for size, few in ((16, 8), (8, 16))]
  # Two more segments of 64 blocks in each of two stages.
  assert deep.device_bytes - shallow.device_bytes == 2 * sum(inputs)
  assert deep.host_temp_bytes > 1.9 * shallow.host_temp_bytes
  assert isinstance(shallow, measure.Memory)
