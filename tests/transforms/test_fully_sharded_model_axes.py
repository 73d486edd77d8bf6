"""Sharded parameters beside tensor parallelism, on (emulated) devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, wire
from jaxmotion.collectives import unshard
from jaxmotion.transforms import gather_block, gather_params
from tests.collectives.helpers import run
from tests.meshes import mesh_of
from tests.transforms.helpers import assert_close

MESH = mesh_of(2, 2)
LAYERS, WIDTH, HIDDEN = 2, 32, 64
RNG = np.random.default_rng(0)
PARAMS = {
  "layers": {
    "up": np.float32(RNG.normal(size=(LAYERS, WIDTH, HIDDEN)) / 6),
    "down": np.float32(RNG.normal(size=(LAYERS, HIDDEN, WIDTH)) / 8),
  },
  "first": np.float32(RNG.normal(size=(16, WIDTH)) / 4),
  "shift": np.zeros(HIDDEN, np.float32),
}
SPECS = {
  "layers": {"up": P(None, None, "model"), "down": P(None, "model")},
  "first": P(),
  "shift": P("model"),
}
BATCH = RNG.normal(size=(2, 8, 16)).astype(np.float32)
BATCH = {"x": BATCH[0], "y": np.sin(BATCH[1])}
INT4 = codecs.uniform(bits=4)


def loss_of(wrap, gather):
  def loss_fn(params, batch):
    block = wrap(
      lambda own, x: (
        x + jnp.tanh(x @ own["up"] + params["shift"][None]) @ own["down"]
      )
    )
    x = batch["x"] @ gather(params["first"])
    x, _ = lax.scan(lambda x, own: (block(own, x), None), x, params["layers"])
    return jnp.mean((x[:, :16] - batch["y"]) ** 2)

  return loss_fn


@functools.cache
def make():
  """(init, step); nothing is compiled yet."""
  return jaxmotion.make_train_step(
    loss_of(gather_block, gather_params),
    jaxmotion.fully_sharded(
      optax.sgd(1.0, momentum=0.9),
      stacked="layers/",
      gradient_codec=INT4,
      error_feedback=True,
    ),
    MESH,
    specs=SPECS,
  )


@functools.cache
def step_once():
  """(start, gradient, state, program): SGD at a rate of 1 subtracts it."""
  init, step = make()
  start = init(PARAMS)
  program = step.lower(start, BATCH).compile()
  state, _ = program(jax.tree.map(jnp.copy, start), BATCH)
  gradient = jax.tree.map(lambda a, b: a - np.asarray(b), PARAMS, state.params)
  return start, gradient, state.opt_state, program


def test_workers_and_the_model_cut_other_dimensions():
  (params, _, state), _, after, _ = step_once()
  for tree in (params, state.inner.value[0].trace, after.inner.value[0].trace):
    up, down = tree["layers"]["up"], tree["layers"]["down"]
    assert up.sharding.spec == P(None, "data", "model")
    assert down.sharding.spec == P(None, "model", "data")
  shapes = {e.addressable_shards[0].data.shape for e in after.error.value}
  # Of a worker's whole gradient, what this device of the model has.
  half = {(1, LAYERS, HIDDEN // 2, WIDTH), (1, LAYERS, WIDTH, HIDDEN // 2)}
  assert shapes == {(1, *PARAMS["first"].shape), *half}


def test_what_was_sent_and_remembered_is_the_gradient():
  _, found, state, _ = step_once()
  first, down, up = (np.asarray(e).mean(0) for e in state.error.value)
  assert all(np.any(e) for e in (first, down, up))
  left = {"first": first, "layers": {"down": down, "up": up}, "shift": 0}
  exact = jax.jit(jax.grad(loss_of(lambda f: f, lambda w: w)))(PARAMS, BATCH)
  assert_close(jax.tree.map(np.add, found, left), exact)


def test_each_device_sends_its_own_shard_and_the_model_its_activations():
  sent = wire.compiled_bytes(step_once()[3], mesh=MESH).per_axis()
  # Two sums of a worker's activations in each layer, as without any exchange.
  assert sent["model",] == 2 * LAYERS * 4 * 4 * WIDTH
  parts = [np.zeros((WIDTH // 2, HIDDEN // 2))] * 2 * LAYERS
  first = np.zeros((16, WIDTH // 2))
  gathered = 2 * sum(4 * p.size for p in parts) + 4 * first.size
  reduced = sum(wire.payload_bytes(INT4, jnp.float32(p)) for p in parts)
  reduced += wire.payload_bytes(INT4, jnp.float32(first))
  shift, loss = 4 * HIDDEN // 2, 4
  assert sent["data",] == gathered + reduced + shift + loss


def test_a_state_goes_on_with_another_number_of_workers():
  init, _ = make()
  state = step_once()[2]
  two, one = (AbstractMesh((n, 2), ("data", "model")) for n in (2, 1))
  layout = checkpoint.describe_state(init, PARAMS, two, specs=SPECS)
  new = checkpoint.resize(init, state, PARAMS, layout, one, specs=SPECS)
  assert_close(new.inner.value, state.inner.value)
  for e, old in zip(new.error.value, state.error.value, strict=True):
    assert e.shape == (1, *old.shape[1:])
    np.testing.assert_allclose(e[0], np.asarray(old).mean(0), atol=1e-6)


def test_a_spec_of_the_axis_that_workers_cut_is_refused():
  with pytest.raises(ValueError, match="`spec` must shard other axes than 0"):
    run(lambda x: unshard(x, "data", spec=P("model")), np.ones((2, 4)), 2)
