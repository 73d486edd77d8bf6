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
CODED = dict(weight_codec=INT8, gradient_codec=INT4, local_codec=INT8)
OPTIONS = {
  "flat": {},
  "again": dict(CODED, regather=True),
  "local": dict(CODED, regather="local"),
  "packed": dict(CODED, regather=False),
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
def gradient(name):
  """The gradient of one step: SGD at a rate of 1 subtracts it."""
  args, program, _ = compiled(name)
  copies = jax.tree.map(jnp.copy, args)
  state, _ = program(*copies)
  return PARAMS["w"] - np.asarray(state.params["w"])


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


@pytest.mark.parametrize("name", ["again", "packed"])
def test_what_is_gathered_again_does_not_change_the_gradient(name):
  np.testing.assert_array_equal(gradient(name), gradient("local"))


def test_the_gradient_is_close_to_that_of_whole_weights():
  exact = jax.jit(jax.grad(loss_of(use_layer)))(PARAMS, BATCH)["w"]
  lost = np.linalg.norm(gradient("local") - exact)
  assert lost < 0.25 * np.linalg.norm(exact)


ADAMW = optax.adamw(1e-2)


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
  message = "`regather` must be True or False without hosts.*HostAxes"
  scheme = jaxmotion.fully_sharded(optax.sgd(1.0), regather="local")
  init, _ = jaxmotion.make_train_step(loss_of(use_layer), scheme, FLAT)
  with pytest.raises(ValueError, match=message):
    init(PARAMS)
  block = gather_block(use_layer, regather="local")
  init, step = make("flat", is_flat=True, block=block)
  with pytest.raises(ValueError, match=message):
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
