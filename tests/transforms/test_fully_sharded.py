"""Training steps whose parameters are sharded over (emulated) workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs, wire
from jaxmotion.transforms import gather_block, gather_params
from tests.transforms.helpers import assert_close

WORKERS, LAYERS, WIDTH = 4, 6, 64
RNG = np.random.default_rng(0)
PARAMS = {
  "embed": RNG.normal(size=(12, 16, WIDTH)).astype(np.float32) / 4,
  "layers": {
    "up": RNG.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 8,
    "bias": np.zeros((LAYERS, WIDTH), np.float32),
  },
  "scale": np.ones(WIDTH, np.float32),
}
INT8 = codecs.uniform(bits=8)
INT4 = codecs.uniform(bits=4, rounding="stochastic")


def mesh_of(workers):
  return Mesh(np.array(jax.devices()[:workers]), ("data",))


def batch_at(step, size=24):
  x = np.random.default_rng(step).normal(size=(size, 12, 16))
  return np.float32(x), np.float32(np.sin(x[:, 0, :4].sum(1, keepdims=True)))


def use_layer(params, x):
  return x + jnp.tanh(x @ params["up"] + params["bias"][None])


def loss_of(block, gather):
  """The loss of a network whose stacked layers are scanned."""

  def loss_fn(params, batch):
    x = jnp.einsum("btf,tfw->bw", batch[0], gather(params["embed"]))
    x, _ = lax.scan(lambda x, own: (block(own, x), None), x, params["layers"])
    return jnp.mean(
      (jnp.mean(x * params["scale"][None], 1, keepdims=True) - batch[1]) ** 2
    )

  return loss_fn


ADAMW = optax.adamw(1e-2)
CODED = dict(weight_codec=INT8, gradient_codec=INT4)
OPTIONS = {
  "fp32": {},
  "coded": CODED,
  "packed": CODED,
  "memory": dict(**CODED, error_feedback=True),
}


@functools.cache
def make(name):
  """(init, step) of one setting; nothing is compiled yet."""
  block = gather_block(use_layer, regather=name != "packed")
  return jaxmotion.make_train_step(
    loss_of(block, gather_params),
    jaxmotion.fully_sharded(ADAMW, stacked="layers/", **OPTIONS[name]),
    mesh_of(WORKERS),
  )


@functools.cache
def compiled(name):
  """What `init` returns, the compiled step, and the bytes that it traces."""
  init, step = make(name)
  start = init(PARAMS)
  args = (start, jax.tree.map(jnp.asarray, batch_at(0)))
  traced = wire.step_bytes(step, *args).total_bytes
  return start, step.lower(*args).compile(), traced


@functools.cache
def train(name):
  """(params, state, losses) of 8 steps; what is run is what is counted."""
  state, program, _ = compiled(name)
  losses = []
  for i in range(8):
    state, loss = program(state, batch_at(i))
    losses.append(float(loss))
  return state.params, state.opt_state, losses


def test_without_codecs_it_is_training_on_one_device():
  loss_fn = loss_of(use_layer, lambda w: w)

  @jax.jit
  def step(params, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  expected, state, alone = PARAMS, jax.jit(ADAMW.init)(PARAMS), []
  for i in range(8):
    expected, state, loss = step(expected, state, batch_at(i))
    alone.append(float(loss))
  params, _, losses = train("fp32")
  np.testing.assert_allclose(losses, alone, rtol=1e-4)
  assert_close(params, expected, atol=1e-4)


def test_parameters_and_moments_are_arrays_in_parts():
  params, state, _ = train("memory")
  for tree in (params, state.inner.value[0].mu):
    assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, PARAMS)
    up = tree["layers"]["up"]
    assert [s.data.shape for s in up.addressable_shards] == [
      (LAYERS, WIDTH // WORKERS, WIDTH)
    ] * WORKERS
  assert params["scale"].sharding.is_fully_replicated
  assert int(state.count) == 8


def test_codecs_train_and_remember_what_they_left_out():
  _, state, losses = train("memory")
  _, _, exact = train("fp32")
  np.testing.assert_allclose(losses, exact, rtol=0.2)
  errors = jax.tree.leaves(state.error.value)
  assert errors and all(np.any(np.asarray(e)) for e in errors)


def arguments(init):
  return jax.eval_shape(init, PARAMS), jax.tree.map(jnp.asarray, batch_at(0))


def test_bytes_are_those_traced_and_compiled_and_few():
  sent = {}
  for name in ("fp32", "memory"):
    _, program, sent[name] = compiled(name)
    assert wire.compiled_bytes(program).total_bytes == sent[name]
  init, step = make("packed")
  packed = wire.step_bytes(step, *arguments(init)).total_bytes
  assert sent["fp32"] / sent["memory"] > 4.5
  assert sent["fp32"] / packed > 6


def test_a_device_holds_its_part_and_the_blocks_at_work():
  memory = compiled("fp32")[1].memory_analysis()
  whole = sum(a.nbytes for a in jax.tree.leaves(PARAMS))
  block, embed = 4 * WIDTH**2, PARAMS["embed"].nbytes
  small = sum(PARAMS["layers"]["bias"].nbytes for _ in range(4))
  # Parameters and two moments; then gradients, and whole weights at work.
  batch = sum(a.nbytes for a in batch_at(0)) / WORKERS
  assert (
    memory.argument_size_in_bytes <= 3 * whole / WORKERS + small + batch + 4096
  )
  activations = 4 * 6 * (LAYERS + 4) * WIDTH * 2
  assert memory.temp_size_in_bytes < (
    2 * whole / WORKERS + 2 * embed + 2 * block + activations + 16384
  )


def test_an_optimizer_that_looks_across_a_leaf_is_refused():
  loss_fn = loss_of(gather_block(use_layer), gather_params)
  init, step = jaxmotion.make_train_step(
    loss_fn,
    jaxmotion.fully_sharded(optax.lamb(1e-3), stacked="layers/"),
    mesh_of(WORKERS),
  )
  with pytest.raises(ValueError, match="`tx` must treat every element"):
    step.eval_shape(*arguments(init))


def test_a_pattern_that_matches_no_leaf_is_named():
  init, _ = jaxmotion.make_train_step(
    loss_of(use_layer, gather_params),
    jaxmotion.fully_sharded(ADAMW, stacked="blocks/"),
    mesh_of(2),
  )
  with pytest.raises(ValueError, match="`stacked` must match .* 'blocks/'"):
    init(PARAMS)
