"""Model state in a training step: statistics, counters and keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType

import jaxmotion
from jaxmotion import transforms, wire
from tests.meshes import mesh_of
from tests.transforms.helpers import assert_close

WORKERS = 4
BATCH = {
  "x": np.random.default_rng(0).normal(1, 2, size=(8, 3)).astype(np.float32),
  "y": np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32),
}


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(4)(x))
    seen = self.variable("batch_stats", "seen", lambda: jnp.zeros((), int))
    seen.value += 1
    return nn.Dense(2)(nn.relu(x))


NET = Net()
VARIABLES = jax.jit(NET.init)(jax.random.key(0), BATCH["x"])
PARAMS, STATS = VARIABLES["params"], VARIABLES["batch_stats"]
TX = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))


def loss_fn(params, batch_stats, batch):
  variables = {"params": params, "batch_stats": batch_stats}
  y, changed = NET.apply(variables, batch["x"], mutable=["batch_stats"])
  return jnp.mean((y - batch["y"]) ** 2), changed["batch_stats"]


@functools.cache
def trained(kind=AxisType.Auto):
  """State and loss after two steps, and the step."""
  init, step = jaxmotion.make_train_step(
    loss_fn, TX, mesh_of(WORKERS, kind=kind), model_state="mean", donate=False
  )
  state = init(PARAMS, STATS)
  for _ in range(2):
    state, loss = step(state, BATCH)
  return state, loss, step


@functools.cache
def by_hand():
  """The same two steps of all workers' examples, without any map."""
  shards = jax.tree.map(lambda a: a.reshape(WORKERS, 2, -1), BATCH)
  compute = jax.vmap(jax.value_and_grad(loss_fn, has_aux=True), (None, None, 0))

  @jax.jit
  def step(params, stats):
    (losses, own), grads = compute(params, stats, shards)
    mean = lambda tree: jax.tree.map(lambda a: a.mean(0).astype(a.dtype), tree)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean(grads))
    return params, mean(own), mean(losses)

  return step(*step(PARAMS, STATS)[:2])


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_mean_statistics_are_those_of_a_step_written_by_hand(kind):
  (params, stats, _), loss, _ = trained(kind)
  found = params, stats, loss
  assert_close(found, by_hand(), rtol=1e-5)
  assert all(a.sharding.is_fully_replicated for a in jax.tree.leaves(found))
  assert int(stats["seen"]) == 3  # `NET.init` counts too.


def test_mean_statistics_travel_with_the_loss_in_one_sum():
  state, _, step = trained()
  traced = wire.step_bytes(step, state, BATCH)
  compiled = wire.compiled_bytes(step.lower(state, BATCH).compile())
  floats = 2 * 4 + 1  # Mean and variance of 4 features, and the loss.
  sums = [m for m in traced.moves if m.payload_bytes == 4 * floats]
  assert len(sums) == 1
  assert sum(m.count for m in traced.moves) == 1 + len(jax.tree.leaves(PARAMS))
  assert compiled.total_bytes == traced.total_bytes


def test_integers_and_keys_are_taken_as_equal_only_if_they_are():
  def make_step(new_state):
    def loss(params, model_state, batch):
      return jnp.mean(batch["x"] @ params), new_state(model_state, batch)

    return jaxmotion.make_train_step(
      loss, TX, mesh_of(WORKERS), model_state="mean"
    )

  model = {"key": jax.random.key(0), "n": jnp.zeros((), int)}

  def count_steps(state, batch):
    half = {"bf16": jnp.mean(batch["x"]).astype(jnp.bfloat16)}
    return half | {
      "key": jax.random.split(state["key"])[0],
      "n": lax.fori_loop(0, 3, lambda i, n: n + 1, state["n"]),
    }

  init, step = make_step(count_steps)
  state = init(jnp.ones(3), model | {"bf16": jnp.zeros((), jnp.bfloat16)})
  new = step(state, BATCH)[0].model_state
  assert int(new["n"]) == 3 and new["bf16"].dtype == jnp.bfloat16
  assert new["key"] == jax.random.split(jax.random.key(0))[0]
  np.testing.assert_allclose(new["bf16"], BATCH["x"].mean(), rtol=1e-2)

  for count_own in (
    lambda state, batch: state | {"n": jnp.sum(batch["x"] > 0)},
    lambda state, batch: state | {"n": lax.axis_index("data")},
  ):
    init, step = make_step(count_own)
    state = init(jnp.ones(3), model)
    with pytest.raises(ValueError, match="`model_state/n` .*'local'"):
      step(state, BATCH)


def test_a_skipped_step_keeps_the_statistics():
  txs = {
    "mean": transforms.skip_nonfinite(TX, "data"),
    "local": jaxmotion.sharded("data", optax.sgd(0.1), nonfinite="skip"),
  }
  bad = BATCH | {"x": BATCH["x"].copy()}
  bad["x"][0] = np.nan
  for mode, tx in txs.items():
    init, step = jaxmotion.make_train_step(
      loss_fn, tx, mesh_of(WORKERS), model_state=mode, donate=False
    )
    old = init(PARAMS, STATS)
    new, _ = step(old, bad)
    assert int(new.opt_state.skipped) == 1
    for a, b in zip(
      *map(jax.tree.leaves, (new.model_state, old.model_state)), strict=True
    ):
      is_kept = jnp.issubdtype(a.dtype, jnp.floating)
      np.testing.assert_array_equal(a, b if is_kept else b + 1)


@pytest.mark.parametrize(
  ("result", "message"),
  [
    (lambda loss, state: loss, r"must return \(loss, model_state\)"),
    (lambda loss, state: (loss, {}), "`loss_fn` must return a model state"),
    (lambda loss, state: (loss, state + jnp.ones(2)), "of the structure, .*"),
  ],
)
def test_another_result_of_the_loss_is_refused(result, message):
  init, step = jaxmotion.make_train_step(
    lambda params, state, batch: result(jnp.mean(params), state),
    TX,
    mesh_of(WORKERS),
    model_state="mean",
  )
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(step, init(jnp.ones(3), jnp.zeros(())), BATCH)
