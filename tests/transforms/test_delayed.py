"""Steps that apply the mean gradient of the step before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, wire
from tests.meshes import mesh_of
from tests.transforms.helpers import assert_close

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(6, 4)).astype(np.float32)}
BATCHES = [
  {
    "x": RNG.normal(size=(8, 6)).astype(np.float32),
    "y": RNG.normal(size=(8, 4)).astype(np.float32),
    "mask": np.float32(np.arange(8) % 3 > 0),
  }
  for _ in range(3)
]
INT4 = codecs.feedback(codecs.uniform(bits=4, block=8))


def loss_fn(params, batch, key=None):
  y = jnp.tanh(batch["x"] @ params["w"])
  if key is not None:
    y = y * jax.random.bernoulli(key, 0.5, y.shape)
  return jnp.mean((y - batch["y"]) ** 2)


def masked_loss(params, batch):
  y = jnp.tanh(batch["x"] @ params["w"])
  errors = jnp.mean((y - batch["y"]) ** 2, -1) * batch["mask"]
  return jnp.sum(errors) / jnp.sum(batch["mask"])


@functools.cache
def make_steps(
  workers=4, codec=INT4, specs=None, loss_fn=loss_fn, delays=True, **options
):
  mesh = mesh_of(workers)
  if specs is not None:
    mesh = mesh_of(2, 2)
  scheme = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.5, 0.9))
  if delays:
    is_weighted = "weight_fn" in options
    scheme = jaxmotion.delayed(scheme, is_weighted=is_weighted)
  return jaxmotion.make_train_step(
    loss_fn, scheme, mesh, specs=specs, donate=False, **options
  )


def train(steps, **kwargs):
  init, step = steps
  state, losses = init(PARAMS), []
  for batch in BATCHES:
    state, loss = step(state, batch, **kwargs)
    losses.append(loss)
  return state, losses


@pytest.mark.parametrize(
  "specs", (None, P(None, "model")), ids=("replicated", "model axis")
)
def test_each_step_applies_the_gradient_at_the_parameters_of_before(specs):
  state, losses = train(make_steps(2, codecs.identity(), specs))
  tx = optax.sgd(0.5, 0.9)
  expected, pending = PARAMS, jax.tree.map(np.zeros_like, PARAMS)
  inner = tx.init(expected)
  compute = jax.jit(jax.value_and_grad(loss_fn))
  for batch, found in zip(BATCHES, losses, strict=True):
    loss, grads = compute(expected, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    updates, inner = tx.update(pending, inner)
    expected, pending = optax.apply_updates(expected, updates), grads
  np.testing.assert_allclose(
    state.params["w"], expected["w"], rtol=1e-5, atol=1e-6
  )
  own, weight = state.opt_state.pending.value
  np.testing.assert_allclose(
    own["w"].mean(0), pending["w"], rtol=1e-5, atol=1e-6
  )
  assert weight is None
  assert int(state.opt_state.count) == len(BATCHES)


def test_a_thread_computes_what_one_program_computes():
  found = [
    train(make_steps(1, overlap=overlap), key=jax.random.key(0))
    for overlap in ("program", "thread")
  ]
  jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("options", [{}, dict(workers=1, overlap="thread")])
def test_steps_run_in_a_loop_of_another_program(options):
  init, step = make_steps(**options)
  batches = jax.tree.map(lambda *rows: np.stack(rows), *BATCHES)
  loop = jax.jit(lambda state: jax.lax.scan(step, state, batches))
  state, losses = train((init, step))
  found, expected = loop(init(PARAMS)), (state, jnp.stack(losses))
  assert_close(found, expected, rtol=1e-5)
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_weights_of_other_workers_give_the_same_mean_gradient():
  options = dict(
    codec=codecs.identity(),
    loss_fn=masked_loss,
    weight_fn=lambda batch: jnp.sum(batch["mask"] * batch["x"][:, 0] ** 2),
  )
  init, step = make_steps(**options)
  state, _ = step(init(PARAMS), BATCHES[0])
  layout = checkpoint.describe_state(init, PARAMS, mesh_of(4))
  grads, weights = state.opt_state.pending.value
  expected = np.average(grads["w"], axis=0, weights=weights)
  assert np.ptp(weights) > 0.1
  for workers in (3, 1, 2):
    init, step = make_steps(workers, **options)
    other = checkpoint.resize(
      init, state.opt_state, PARAMS, layout, mesh_of(workers)
    )
    assert int(other.count) == 1
    grads, weights = other.pending.value
    found = np.average(grads["w"], axis=0, weights=weights)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  step(init(PARAMS)._replace(opt_state=other), BATCHES[1])


def test_a_delay_sends_the_bytes_of_the_step_without_it():
  sent = []
  for delays in (False, True):
    init, step = make_steps(delays=delays)
    sent.append(wire.step_bytes(step, init(PARAMS), BATCHES[0]).total_bytes)
  assert sent[0] == sent[1] > 0
