"""Weights of workers and microbatches in a training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import codecs, wire

WORKERS = 4
LENGTHS = np.array([5, 0, 3, 1, 0, 0, 4, 2, 1, 1, 5, 5, 2, 0, 0, 3])
X = np.random.default_rng(0).normal(size=(16, 5, 3)).astype(np.float32)
BATCH = {"x": X, "mask": (np.arange(5) < LENGTHS[:, None])}
PARAMS = {"w": np.full((3, 2), 0.4, np.float32), "b": np.ones(2, np.float32)}
TX = optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0))


def count_tokens(batch):
  return jnp.sum(batch["mask"])


def loss_fn(params, batch):
  """Mean over tokens: not a number where all is padding."""
  y = jnp.tanh(batch["x"] @ params["w"] + params["b"][None, None])
  errors = jnp.where(batch["mask"][..., None], (y - 1) ** 2, 0)
  total = jnp.sum(errors) / count_tokens(batch)
  return total, {"norm": total * 2, "tokens": count_tokens(batch)}


@functools.cache
def make_step(tx=TX, **options):
  mesh = jax.make_mesh((WORKERS,), ("data",))
  options = {"has_aux": True, "donate": False} | options
  return jaxmotion.make_train_step(loss_fn, tx, mesh, **options)


@pytest.mark.parametrize("microbatches", (1, 2, 4))
def test_padded_batches_give_the_token_mean_of_the_whole_batch(microbatches):
  init, step = make_step(weight_fn=count_tokens, microbatches=microbatches)
  state, (loss, aux) = step(init(PARAMS), BATCH)
  (expected, _), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(
    PARAMS, BATCH
  )
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_allclose(aux["norm"], 2 * expected, rtol=1e-6)
  tokens = LENGTHS.reshape(WORKERS, microbatches, -1).sum(-1)
  np.testing.assert_array_equal(aux["tokens"], np.squeeze(tokens))
  for name, grad in grads.items():
    np.testing.assert_allclose(
      state.params[name], PARAMS[name] - grad, rtol=1e-6, atol=1e-6
    )


def test_nothing_but_padding_changes_nothing():
  init, step = make_step(weight_fn=count_tokens, microbatches=2)
  empty = BATCH | {"mask": np.zeros_like(BATCH["mask"])}
  state, (loss, _) = step(init(PARAMS), empty)
  assert float(loss) == 0
  for name in PARAMS:
    np.testing.assert_array_equal(state.params[name], PARAMS[name])


def test_the_weight_travels_with_the_loss():
  plain, weighted = make_step(), make_step(weight_fn=count_tokens)
  sums = []
  for init, step in (plain, weighted):
    traced = wire.step_bytes(step, init(PARAMS), BATCH)
    sums.append(sum(move.payload_bytes * move.count for move in traced.moves))
  # The exchange sums the weight, and so does the loss.
  assert sums[1] - sums[0] == 2 * 4


def test_microbatches_send_the_same_bytes():
  codec = codecs.feedback(codecs.uniform(bits=4))
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(1.0))
  ledgers = []
  for microbatches in (1, 4):
    init, step = make_step(tx, microbatches=microbatches)
    state = init(PARAMS)
    ledgers.append(wire.step_bytes(step, state, BATCH))
    compiled = wire.compiled_bytes(step.lower(state, BATCH).compile())
    assert compiled.total_bytes == ledgers[-1].total_bytes
  assert ledgers[0] == ledgers[1]


def test_model_state_and_keys_go_through_the_microbatches():
  def loss(params, model_state, batch, key):
    draw = jax.random.uniform(key)
    mean = 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch)
    state = {"mean": mean, "seen": model_state["seen"] + 1}
    return params * jnp.mean(batch), (state, {"draw": draw[None]})

  mesh = jax.make_mesh((WORKERS,), ("data",))
  init, step = jaxmotion.make_train_step(
    loss, TX, mesh, has_aux=True, model_state="mean", microbatches=2
  )
  x, key = X[:, 0, 0], jax.random.key(5)
  model = {"mean": jnp.ones(()), "seen": jnp.zeros((), int)}
  state, (value, aux) = step(init(jnp.ones(()), model), x, key=key)
  means = x.reshape(WORKERS, 2, 2).mean(2)
  np.testing.assert_allclose(value, x.mean(), rtol=1e-5)
  expected = (0.25 + 0.25 * means[:, 0] + 0.5 * means[:, 1]).mean()
  np.testing.assert_allclose(state.model_state["mean"], expected, rtol=1e-5)
  assert int(state.model_state["seen"]) == 2
  of_worker = jax.random.fold_in(jax.random.fold_in(key, 0), 3)
  draw = jax.random.uniform(jax.random.fold_in(of_worker, 1))
  draws = np.asarray(aux["draw"])
  np.testing.assert_array_equal(draws[3, 1], [draw])
  assert len(np.unique(draws)) == 2 * WORKERS


def test_gradients_of_microbatches_add_up_in_float32():
  def loss(params, batch):
    return jnp.sum(params.astype(jnp.float32) * jnp.mean(batch))

  mesh = jax.make_mesh((WORKERS,), ("data",))
  init, step = jaxmotion.make_train_step(loss, TX, mesh, microbatches=64)
  # 64 values that bfloat16 cannot add up one by one.
  batch = np.tile(np.r_[256, np.ones(63)], WORKERS).astype(np.float32)
  params = step(init(jnp.zeros(1, jnp.bfloat16)), batch)[0].params
  mean = jnp.bfloat16(319 / 64)
  assert params.dtype == jnp.bfloat16 and params[0] == -mean


@pytest.mark.parametrize(
  ("weight", "message"),
  [
    (
      lambda batch: batch["mask"].sum(1),
      "must return a real scalar, got int",
    ),
    (lambda batch: jnp.any(batch["mask"]), "must return a real scalar.*bool"),
    (lambda batch: None, "must return a real scalar, got None"),
  ],
)
def test_a_weight_that_is_no_number_is_refused(weight, message):
  init, step = make_step(weight_fn=weight)
  with pytest.raises(TypeError, match=f"`weight_fn` {message}"):
    jax.eval_shape(step, init(PARAMS), BATCH)


def test_two_weights_are_refused():
  init, step = make_step(weight_fn=count_tokens)
  with pytest.raises(ValueError, match="`weight` must not be given"):
    step(init(PARAMS), BATCH, weight=1.0)
