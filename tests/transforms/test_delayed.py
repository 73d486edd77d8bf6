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
def make_steps(
  workers=4, codec=INT4, specs=None, loss_fn=loss_fn, delays=True, **options
):
  mesh = make_mesh(workers)
  if specs is not None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
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


def test_a_step_with_a_thread_runs_inside_of_another_program():
  init, step = make_steps(1, overlap="thread")
  args = (init(PARAMS), BATCHES[0])
  found, expected = jax.jit(step)(*args), step(*args)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_steps_run_in_a_loop_of_another_program():
  init, step = make_steps()
  batches = jax.tree.map(lambda *rows: np.stack(rows), *BATCHES)
  found = jax.jit(lambda state: jax.lax.scan(step, state, batches))(
    init(PARAMS)
  )
  state, losses = train((init, step))
  for a, b in zip(
    *map(jax.tree.leaves, (found, (state, jnp.stack(losses)))), strict=True
  ):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_state", ("mean", "local"))
def test_the_model_state_is_that_of_the_newest_batch(model_state):
  def stateful_loss(params, mean, batch):
    return loss_fn(params, batch), 0.5 * mean + 0.5 * batch["x"].mean(0)

  init, step = make_steps(loss_fn=stateful_loss, model_state=model_state)
  state, losses = init(PARAMS, np.zeros(6, np.float32)), []
  for batch in BATCHES:
    state, loss = step(state, batch)
    losses.append(loss)
  expected = np.zeros((4, 6), np.float32)
  for batch in BATCHES:
    expected = 0.5 * expected + 0.5 * batch["x"].reshape(4, 2, 6).mean(1)
  found = state.model_state
  if model_state == "local":
    found = found.value
  else:
    expected = expected.mean(0)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  without, expected_losses = train(make_steps())
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
  np.testing.assert_allclose(
    state.params["w"], without.params["w"], rtol=1e-5, atol=1e-6
  )


def test_weights_are_those_of_the_step_of_the_gradient():
  init, step = make_steps(
    codec=codecs.identity(),
    loss_fn=masked_loss,
    weight_fn=lambda batch: jnp.sum(batch["mask"]),
  )
  state, _ = step(init(PARAMS), BATCHES[0])
  state, loss = step(state, BATCHES[1])
  compute = jax.jit(jax.value_and_grad(masked_loss))
  grads = compute(PARAMS, BATCHES[0])[1]
  np.testing.assert_allclose(
    state.params["w"], PARAMS["w"] - 0.5 * grads["w"], rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(loss, compute(PARAMS, BATCHES[1])[0], rtol=1e-6)


def test_a_delayed_state_continues_on_other_workers():
  init, step = make_steps()
  state = init(PARAMS)
  for batch in BATCHES[:2]:
    state, _ = step(state, batch)
  layout = checkpoint.describe_state(init, PARAMS, make_mesh(4))
  init, step = make_steps(2)
  other = checkpoint.resize(init, state.opt_state, PARAMS, layout, make_mesh(2))
  means = [s.pending.value[0]["w"].mean(0) for s in (state.opt_state, other)]
  np.testing.assert_allclose(*means, rtol=1e-6, atol=1e-7)
  assert other.pending.value[0]["w"].shape == (2, 6, 4)
  assert int(other.count) == 2
  params = jax.device_get(state.params)
  step(init(params)._replace(opt_state=other), BATCHES[2])


def test_weights_of_other_workers_give_the_same_mean_gradient():
  options = dict(
    codec=codecs.identity(),
    loss_fn=masked_loss,
    weight_fn=lambda batch: jnp.sum(batch["mask"] * batch["x"][:, 0] ** 2),
  )
  init, step = make_steps(**options)
  state, _ = step(init(PARAMS), BATCHES[0])
  layout = checkpoint.describe_state(init, PARAMS, make_mesh(4))
  grads, weights = state.opt_state.pending.value
  expected = np.average(grads["w"], axis=0, weights=weights)
  assert np.ptp(weights) > 0.1
  for workers in (3, 2, 1):
    init, _ = make_steps(workers, **options)
    other = checkpoint.resize(
      init, state.opt_state, PARAMS, layout, AbstractMesh((workers,), ("data",))
    )
    grads, weights = other.pending.value
    found = np.average(grads["w"], axis=0, weights=weights)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_step_draws_its_own_keys():
  init, step = make_steps()
  start = state = init(PARAMS)
  key = jax.random.key(0)
  losses = []
  for _ in range(3):  # The same parameters and batch, but for the count.
    state, loss = step(state._replace(params=start.params), BATCHES[0], key=key)
    losses.append(float(loss))
  assert len(set(losses)) == 3


def test_a_delay_sends_the_bytes_of_the_step_without_it():
  sent = []
  for delays in (False, True):
    init, step = make_steps(delays=delays)
    sent.append(wire.step_bytes(step, init(PARAMS), BATCHES[0]).total_bytes)
  assert sent[0] == sent[1] > 0


@pytest.mark.parametrize(
  ("is_weighted", "message"),
  [
    (False, "`is_weighted` must be True of `delayed`.* gets a `weight`"),
    (True, "`is_weighted` must be False of `delayed`.* got no `weight`"),
  ],
)
def test_an_unexpected_weight_is_refused(is_weighted, message):
  chain = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.5))
  init, step = jaxmotion.make_train_step(
    loss_fn,
    jaxmotion.delayed(chain, is_weighted=is_weighted),
    make_mesh(4),
    weight_fn=None if is_weighted else lambda batch: batch["mask"].sum(),
  )
  with pytest.raises(ValueError, match=message):
    step(init(PARAMS), BATCHES[0])


def test_a_state_without_pending_gradients_is_refused():
  state = make_steps(delays=False)[0](PARAMS)
  with pytest.raises(TypeError, match="`state.*` must be what `init` returned"):
    make_steps()[1](state, BATCHES[0])
