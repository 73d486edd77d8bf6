"""Steps that apply the mean gradient of the step before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, wire

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(6, 4)).astype(np.float32)}
BATCHES = [
  {
    "x": RNG.normal(size=(8, 6)).astype(np.float32),
    "y": RNG.normal(size=(8, 4)).astype(np.float32),
    "mask": np.float32(np.arange(8) % 3 > 0),
  }
  for _ in range(5)
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


def make_mesh(workers):
  return Mesh(np.array(jax.devices()[:workers]), ("data",))


@functools.cache
def make_steps(workers=4, codec=INT4, specs=None, **options):
  mesh = make_mesh(workers)
  if specs is not None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
  tx = optax.chain(
    jaxmotion.exchange("data", codec, specs=specs), optax.sgd(0.5, 0.9)
  )
  options = {"loss_fn": loss_fn, "delay": 1} | options
  return jaxmotion.data_parallel(
    tx=tx, mesh=mesh, specs=specs, donate=False, **options
  )


def train(steps, **kwargs):
  init, step = steps
  params, state = init(PARAMS)
  losses = []
  for batch in BATCHES:
    params, state, loss = step(params, state, batch, **kwargs)
    losses.append(loss)
  return params, state, losses


@pytest.mark.parametrize(
  "specs", (None, P(None, "model")), ids=("replicated", "model axis")
)
def test_each_step_applies_the_gradient_at_the_parameters_of_before(specs):
  steps = make_steps(2, codecs.identity(), specs)
  params, state, losses = train(steps)
  tx = optax.sgd(0.5, 0.9)
  expected, pending = PARAMS, jax.tree.map(np.zeros_like, PARAMS)
  inner = tx.init(expected)
  compute = jax.jit(jax.value_and_grad(loss_fn))
  for batch, found in zip(BATCHES, losses, strict=True):
    loss, grads = compute(expected, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    updates, inner = tx.update(pending, inner)
    expected, pending = optax.apply_updates(expected, updates), grads
  np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-5, atol=1e-6)
  own, weight = state.pending.value
  np.testing.assert_allclose(
    own["w"].mean(0), pending["w"], rtol=1e-5, atol=1e-6
  )
  assert weight is None
  assert int(state.count) == len(BATCHES)


def test_a_thread_computes_what_one_program_computes():
  found = [
    train(make_steps(1, overlap=overlap), key=jax.random.key(0))
    for overlap in ("program", "thread")
  ]
  jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_step_with_a_thread_runs_inside_of_another_program():
  init, step = make_steps(1, overlap="thread")
  args = (*init(PARAMS), BATCHES[0])
  found, expected = jax.jit(step)(*args), step(*args)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_weights_are_those_of_the_step_of_the_gradient():
  init, step = make_steps(
    codec=codecs.identity(),
    loss_fn=masked_loss,
    weight_fn=lambda batch: jnp.sum(batch["mask"]),
  )
  params, state, _ = step(*init(PARAMS), BATCHES[0])
  params, _, loss = step(params, state, BATCHES[1])
  compute = jax.jit(jax.value_and_grad(masked_loss))
  grads = compute(PARAMS, BATCHES[0])[1]
  np.testing.assert_allclose(
    params["w"], PARAMS["w"] - 0.5 * grads["w"], rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(loss, compute(PARAMS, BATCHES[1])[0], rtol=1e-6)


def test_a_delayed_state_continues_on_other_workers():
  init, step = make_steps()
  mesh = make_mesh(4)
  params, state = init(PARAMS)
  params, state, _ = step(params, state, BATCHES[0])
  params, state, _ = step(params, state, BATCHES[1])
  layout = checkpoint.describe_state(init, PARAMS, mesh)
  init, step = make_steps(2)
  other = checkpoint.resize(init, state, PARAMS, layout, make_mesh(2))
  means = [s.pending.value[0]["w"].mean(0) for s in (state, other)]
  np.testing.assert_allclose(*means, rtol=1e-6, atol=1e-7)
  assert other.pending.value[0]["w"].shape == (2, 6, 4)
  assert int(other.count) == 2
  params = jax.device_put(np.asarray(params["w"]))
  step({"w": params}, other, BATCHES[2])


def test_weights_of_other_workers_give_the_same_mean_gradient():
  options = dict(
    codec=codecs.identity(),
    loss_fn=masked_loss,
    weight_fn=lambda batch: jnp.sum(batch["mask"] * batch["x"][:, 0] ** 2),
  )
  init, step = make_steps(**options)
  mesh = make_mesh(4)
  params, state = init(PARAMS)
  _, state, _ = step(params, state, BATCHES[0])
  layout = checkpoint.describe_state(init, PARAMS, mesh)
  grads, weights = state.pending.value
  expected = np.average(grads["w"], axis=0, weights=weights)
  assert np.ptp(weights) > 0.1
  for workers in (3, 2, 1):
    init, _ = make_steps(workers, **options)
    other = checkpoint.resize(
      init, state, PARAMS, layout, AbstractMesh((workers,), ("data",))
    )
    grads, weights = other.pending.value
    found = np.average(grads["w"], axis=0, weights=weights)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_step_draws_its_own_keys():
  init, step = make_steps()
  params, state = init(PARAMS)
  key = jax.random.key(0)
  losses = []
  for _ in range(3):  # The same parameters and batch, but for the count.
    _, state, loss = step(params, state, BATCHES[0], key=key)
    losses.append(float(loss))
  assert len(set(losses)) == 3


def test_a_delay_sends_the_bytes_of_the_step_without_it():
  sent = []
  for delay in (0, 1):
    init, step = make_steps(delay=delay)
    sent.append(wire.step_bytes(step, *init(PARAMS), BATCHES[0]).total_bytes)
  assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"delay": 2}, "`delay` must be .* got 2"),
    ({"model_state": "mean"}, "`delay` must be 0 with a `model_state`"),
    (
      {"overlap": "thread"},
      "`overlap` must be 'program' .* got 'thread' for 4",
    ),
    ({"overlap": "stream"}, "`overlap` must be .* got 'stream'"),
  ],
)
def test_wrong_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make_steps(**options)


def test_a_state_without_pending_gradients_is_refused():
  params, state = make_steps(delay=0)[0](PARAMS)
  with pytest.raises(
    TypeError, match="`opt_state` must be what `init` returned"
  ):
    make_steps()[1](params, state, BATCHES[0])
