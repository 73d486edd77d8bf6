"""Sharded parameters on (emulated) workers, and on hosts of several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmotion
from jaxmotion import codecs, wire
from jaxmotion.transforms import gather_block
from tests.meshes import mesh_of

HOSTS, DEVICES, LAYERS, WIDTH = 2, 2, 6, 64
WORKERS, AXES = HOSTS * DEVICES, jaxmotion.HostAxes("host", "device")
FLAT = mesh_of(WORKERS)
MESH = mesh_of(HOSTS, DEVICES, names=AXES.names)
RNG = np.random.default_rng(0)
PARAMS = {
  "w": np.float32(RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / 8),
  "scale": np.ones(WIDTH, np.float32),
}
BATCH = RNG.normal(size=(2, 4 * WORKERS, WIDTH)).astype(np.float32)
BATCH = {"x": BATCH[0], "y": np.sin(BATCH[1])}
INT8 = codecs.uniform(bits=8)
INT4 = codecs.uniform(bits=4, block=128)
FLAT_CODED = dict(weight_codec=INT8, gradient_codec=INT4)
CODED = dict(FLAT_CODED, local_codec=INT8)
OPTIONS = {
  "fp32": dict(regather="local"),
  "flat": {},
  "flat memory": dict(FLAT_CODED, error_feedback=True),
  "flat packed": dict(FLAT_CODED, regather=False),
  "again": dict(CODED, regather=True),
  "local": dict(CODED, regather="local"),
  "packed": dict(CODED, regather=False),
  "lossless": dict(weight_codec=INT8, local_codec=INT8),
  "memory": dict(CODED, regather="local", error_feedback=True),
}


def use_layer(w, x):
  return x + jnp.tanh(x @ w)


def loss_of(block):
  def loss_fn(params, batch):
    x, _ = lax.scan(lambda x, w: (block(w, x), None), batch["x"], params["w"])
    return jnp.mean((x * params["scale"][None] - batch["y"]) ** 2)

  return loss_fn


def make(name, tx=None, is_flat=False, block=None):
  scheme = jaxmotion.fully_sharded(
    tx or optax.sgd(1.0), stacked="w", **OPTIONS[name]
  )
  return jaxmotion.make_train_step(
    loss_of(block or gather_block(use_layer)),
    scheme,
    FLAT if is_flat else MESH,
    axis_name="data" if is_flat else AXES,
  )


@functools.cache
def compiled(name, tx=None, is_flat=False):
  """What `init` returns, the compiled step and the traced ledger."""
  init, step = make(name, tx, is_flat)
  args = (init(PARAMS), jax.tree.map(jnp.asarray, BATCH))
  return args, step.lower(*args).compile(), wire.step_bytes(step, *args)


@functools.cache
def exact_gradient():
  return jax.jit(jax.grad(loss_of(use_layer)))(PARAMS, BATCH)


@functools.cache
def gradient(name):
  """The gradient of one step: SGD at a rate of 1 subtracts it."""
  args, program, _ = compiled(name)
  copies = jax.tree.map(jnp.copy, args)
  state, _ = program(*copies)
  found = jax.tree.map(lambda a, b: a - np.asarray(b), PARAMS, state.params)
  return found, state.opt_state


def test_without_codecs_the_gradient_is_the_mean_of_all_workers():
  found, _ = gradient("fp32")
  for name, expected in exact_gradient().items():
    np.testing.assert_allclose(found[name], expected, atol=1e-6)


@pytest.mark.parametrize("name", ["again", "local", "packed"])
def test_bytes_of_each_axis_are_predicted_traced_and_compiled(name):
  _, program, traced = compiled(name)
  part = jnp.zeros((WIDTH // WORKERS, WIDTH))
  by_host = jnp.zeros((HOSTS, *part.shape))
  weights = wire.payload_bytes(INT8, part)
  # Between hosts each payload crosses once; then a device forwards the hosts'.
  between = (HOSTS - 1) * weights * (2 if name == "again" else 1)
  within = (DEVICES - 1) * HOSTS * weights * (1 if name == "packed" else 2)
  between += (HOSTS - 1) * wire.payload_bytes(INT4, part)
  within += (DEVICES - 1) * wire.payload_bytes(INT8, by_host)
  # The scale is averaged whole, and so is the loss, over both axes at once.
  scale = PARAMS["scale"].nbytes
  expected = {
    ("host",): LAYERS * between + scale,
    ("device",): LAYERS * within + 2 * scale,
    AXES.names: 2 * (WORKERS - 1) / WORKERS * 4,
  }
  assert traced.per_axis() == expected
  assert wire.compiled_bytes(program, mesh=MESH).per_axis() == expected


def test_secondary_parts_cost_little_memory():
  temps = {
    name: compiled(name)[1].memory_analysis().temp_size_in_bytes
    for name in ("again", "local", "packed")
  }
  assert temps["again"] < temps["local"] < temps["packed"]
  words = LAYERS * wire.payload_bytes(INT8, jnp.zeros((WIDTH, WIDTH)))
  assert temps["local"] - temps["again"] < 1.2 * words / DEVICES


@pytest.mark.parametrize("name", ["again", "local", "packed"])
def test_what_is_gathered_again_does_not_change_the_gradient(name):
  found, _ = gradient(name)
  np.testing.assert_array_equal(found["w"], gradient("local")[0]["w"])
  exact = exact_gradient()["w"]
  error = np.linalg.norm(found["w"] - exact) / np.linalg.norm(exact)
  assert error < 0.25


def test_sent_and_remembered_means_of_hosts_are_the_gradient():
  found, state = gradient("memory")
  (error,) = state.error.value
  # Of each device the rows that it reduces, of each host its own mean.
  left = np.asarray(error).reshape(HOSTS, DEVICES, LAYERS, HOSTS, -1, WIDTH)
  left = left.mean(0).transpose(1, 2, 0, 3, 4).reshape(PARAMS["w"].shape)
  assert np.abs(left).max() > 0
  # Weights of 8 bits and sums within a host are as they are without memory.
  lossless, _ = gradient("lossless")
  np.testing.assert_allclose(found["w"] + left, lossless["w"], atol=1e-6)


ADAMW = optax.adamw(1e-2)


def test_parameters_and_moments_are_arrays_in_parts():
  (state, _), _, _ = compiled("flat", ADAMW, True)
  for tree in (state.params, state.opt_state.inner.value[0].mu):
    assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, PARAMS)
    shapes = [s.data.shape for s in tree["w"].addressable_shards]
    assert shapes == [(LAYERS, WIDTH // WORKERS, WIDTH)] * WORKERS
    assert tree["scale"].sharding.is_fully_replicated


def test_bytes_between_workers_are_those_traced_and_compiled_and_few():
  sent = {}
  for name in ("flat", "flat memory"):
    _, program, traced = compiled(name, ADAMW, True)
    sent[name] = wire.compiled_bytes(program).total_bytes
    assert traced.total_bytes == sent[name]
  init, step = make("flat packed", is_flat=True)
  packed = wire.step_bytes(step, jax.eval_shape(init, PARAMS), BATCH)
  assert sent["flat"] / sent["flat memory"] > 4.5
  assert sent["flat"] / packed.total_bytes > 6


def test_a_device_holds_its_part_and_the_block_at_work():
  memory = compiled("flat", ADAMW, True)[1].memory_analysis()
  # Parameters and two moments; then gradients, and whole weights at work.
  parts, block = PARAMS["w"].nbytes / WORKERS, 4 * WIDTH**2
  batch = sum(a.nbytes for a in BATCH.values()) / WORKERS
  small = 4 * PARAMS["scale"].nbytes + 4096
  assert memory.argument_size_in_bytes <= 3 * parts + batch + small
  activations = (LAYERS + 4) * batch
  assert memory.temp_size_in_bytes < (
    2 * parts + 4 * block + activations + 16384
  )


def test_what_is_done_within_a_host_needs_hosts():
  for axes, options, message in (
    ("host", dict(regather="local"), "`regather` must be True or False wi"),
    (AXES.names, dict(local_codec=INT8), "`local_codec` must be None wi"),
  ):
    scheme = jaxmotion.fully_sharded(optax.sgd(1.0), **options)
    init, _ = jaxmotion.make_train_step(
      loss_of(use_layer), scheme, MESH, axis_name=axes
    )
    with pytest.raises(ValueError, match=f"{message}thout hosts.*HostAxes"):
      init(PARAMS)
  block = gather_block(use_layer, regather="local")
  init, step = make("flat", is_flat=True, block=block)
  with pytest.raises(ValueError, match="`regather` must be True or False with"):
    step.eval_shape(jax.eval_shape(init, PARAMS), BATCH)


def test_an_optimizer_that_looks_across_a_leaf_is_refused():
  init, step = make("flat", optax.lamb(1e-3), is_flat=True)
  with pytest.raises(ValueError, match="`tx` must treat every element"):
    step.eval_shape(jax.eval_shape(init, PARAMS), BATCH)


def test_a_pattern_that_matches_no_leaf_is_named():
  scheme = jaxmotion.fully_sharded(ADAMW, stacked="blocks/")
  init, _ = jaxmotion.make_train_step(loss_of(use_layer), scheme, FLAT)
  with pytest.raises(ValueError, match="`stacked` must match .* 'blocks/'"):
    init(PARAMS)
