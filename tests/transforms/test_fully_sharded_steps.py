"""Fully sharded steps of weighted batches, model state, keys and NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import codecs
from jaxmotion.transforms import gather_params
from tests.meshes import mesh_of
from tests.transforms.helpers import assert_close, bits

WORKERS = 3
MESH = mesh_of(WORKERS)
RNG = np.random.default_rng(0)
PARAMS = {  # Cut, and whole.
  "w": np.float32(RNG.normal(size=(12, 18)) / 4),
  "b": np.zeros(5, np.float32),
}
STATE = {"mean": np.zeros(18, np.float32)}
KEY = jax.random.key(1)


def batch_at(step, size=4 * WORKERS):
  x = np.random.default_rng(step).normal(size=(size, 12)).astype(np.float32)
  # The last worker has nothing but padding.
  real = np.arange(size) % 3 + 1
  return {"x": x, "real": np.where(np.arange(size) < size // 3 * 2, real, 0)}


def loss_fn(params, model_state, batch, key=None):
  """A mean over real examples, not finite if there is none."""
  w, b = (gather_params(params)[name] for name in ("w", "b"))
  weights = batch["real"].astype(jnp.float32)
  h = batch["x"] @ w
  if key is not None:
    h = h * jax.random.bernoulli(key, 0.5, h.shape)
  terms = jnp.sum((jnp.tanh(h) - 0.1) ** 2, 1) + jnp.sum((b - 1) ** 2)
  mean = 0.9 * model_state["mean"] + 0.1 * h.mean(0)
  loss = jnp.sum(weights * terms) / jnp.sum(weights)
  return loss, ({"mean": mean}, {"error": loss**2})


def count_real(batch):
  return batch["real"].sum()


@functools.cache
def steps():
  """(init, step) of both schemes; nothing is compiled yet."""
  adam = optax.adam(1e-2)
  options = dict(has_aux=True, weight_fn=count_real, donate=False)
  return [
    jaxmotion.make_train_step(
      loss_fn, scheme, MESH, model_state="mean", **options
    )
    for scheme in (
      jaxmotion.fully_sharded(adam, nonfinite="skip"),
      optax.chain(jaxmotion.exchange("data"), adam),
    )
  ]


def test_it_trains_as_data_parallel_does():
  results = []
  for init, step in steps():
    state = init(PARAMS, STATE)
    for i in range(2):
      state, metrics = step(state, batch_at(i), key=KEY)
    results.append((state.params, state.model_state, metrics))
  assert_close(*results, atol=1e-6)


def test_a_step_that_is_not_finite_on_one_worker_changes_nothing():
  (init, step), _ = steps()
  before = init(PARAMS, STATE)
  batch = batch_at(0)
  batch["x"][1] = np.nan
  after, _ = step(before, batch, key=KEY)
  state = after.opt_state
  assert int(state.skipped) == 1 and int(state.count) == 1
  assert bits(after[:2]) == bits(before[:2])
  assert bits(state.inner) == bits(before.opt_state.inner)


def sign_step(**options):
  """A step whose gradient is the batch, with error memory."""

  def loss_fn(w, batch):
    return jnp.sum(gather_params(w) * batch[0])

  return jaxmotion.make_train_step(
    loss_fn,
    jaxmotion.fully_sharded(
      optax.sgd(1.0),
      gradient_codec=codecs.sign(),
      error_feedback=True,
      **options,
    ),
    MESH,
  )


def test_nan_of_one_worker_is_made_zero():
  own = np.ones((WORKERS, 12, 16), np.float32)
  own[1, 3, 5] = np.nan
  params = np.zeros((12, 16), np.float32)
  init, step = sign_step(nonfinite="zero")
  (held, _, state), _ = step(init(params), own)
  assert int(state.skipped) == 0
  sent = -np.asarray(held) + np.asarray(state.error.value[0]).mean(0)
  np.testing.assert_allclose(sent, np.nan_to_num(own).mean(0), atol=1e-6)


def test_a_chain_that_needs_the_loss_gets_it():
  tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
  init, step = jaxmotion.make_train_step(
    lambda w, x: jnp.mean(x), jaxmotion.fully_sharded(tx), MESH
  )
  state = init(jnp.zeros(5))
  state, loss = step(state, jnp.arange(6.0))
  assert float(loss) == 2.5
  assert optax.tree.get(state.opt_state.inner.value, "best_value") == 2.5


def test_a_penalty_on_parts_that_were_not_gathered_is_refused():
  def loss_fn(params, batch):
    loss = jnp.mean(batch @ gather_params(params["w"])) + jnp.sum(params["b"])
    return loss + sum(jnp.sum(a**2) for a in jax.tree.leaves(params))

  init, step = jaxmotion.make_train_step(
    loss_fn, jaxmotion.fully_sharded(optax.sgd(0.1)), MESH
  )
  args = jax.eval_shape(init, PARAMS), jnp.ones((6, 12))
  with pytest.raises(ValueError, match="`loss_fn` must gather `params/w`"):
    step.eval_shape(*args)


def test_a_trace_runs_the_loss_once():
  for microbatches in (1, 2):
    calls = []

    def loss_fn(w, x, calls=calls):
      calls.append(x.shape)
      return jnp.mean(x @ gather_params(w))

    init, step = jaxmotion.make_train_step(
      loss_fn,
      jaxmotion.fully_sharded(optax.sgd(0.1)),
      MESH,
      microbatches=microbatches,
    )
    step.trace(jax.eval_shape(init, PARAMS["w"]), jnp.ones((12, 12)))
    assert calls == [(4 // microbatches, 12)]


def test_a_state_of_other_memory_is_refused():
  init, _ = sign_step()
  state = jax.eval_shape(init, jnp.zeros((12, 16)))
  _, step = jaxmotion.make_train_step(
    lambda w, x: 0.0, jaxmotion.fully_sharded(optax.sgd(1.0)), MESH
  )
  with pytest.raises(
    ValueError, match="for the error_feedback of .* False, got"
  ):
    step.eval_shape(state, jnp.ones((3, 12, 16)))


def test_arguments_that_do_nothing_are_refused_by_name():
  init, step = sign_step()
  args = jax.eval_shape(init, jnp.zeros((12, 16))), jnp.ones((3, 12, 16))
  with pytest.raises(ValueError, match="`weight` must not be given.*weight_fn"):
    step.eval_shape(*args, weight=2.0)
  chain = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  init, _ = jaxmotion.make_train_step(
    lambda w, x: 0.0, jaxmotion.fully_sharded(chain), MESH
  )
  with pytest.raises(ValueError, match="`tx` must have no exchange"):
    init(PARAMS)
