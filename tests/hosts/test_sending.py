"""Sums that do not depend on a branch that sends, beside it in a program."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, presets
from jaxmotion.program import (
  COLLECTIVES,
  collective_name,
  flatten,
  inner_jaxprs,
)
from tests.meshes import mesh_of

pytestmark = pytest.mark.unoptimized
MESH = mesh_of(4)
PARAMS = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
BATCH = jnp.ones((8, 8))
INT8 = codecs.uniform(bits=8)


def loss_fn(params, x):
  return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)


def normalized_loss(params, mean, x):
  return loss_fn(params, x - mean[None]), 0.9 * mean + 0.1 * x.mean(0)


def sends(step):
  return collective_name(step.name) in COLLECTIVES or any(
    sends(inner)
    for jaxpr in inner_jaxprs(step.eqn)
    for inner in flatten(jaxpr, calls="all", backend="cpu").steps
  )


def unordered_pairs(jaxpr):
  """Yields (branch, other) that send, where neither depends on the other."""
  program = flatten(jaxpr, calls="all", backend="cpu")
  behind, senders = {}, []
  for step in program.steps:
    found = set()
    for value in step.ins:
      for origin in (value, getattr(value, "source", None)):
        found |= behind.get(id(origin), set())
    if sends(step):
      for i, other in enumerate(senders):
        if "cond" in (step.name, other) and i not in found:
          yield other, step.name
      found = found | {len(senders)}
      senders.append(step.name)
    behind |= dict.fromkeys(map(id, step.outs), found)


def trace(step, *args):
  return list(unordered_pairs(step.trace(*args).jaxpr))


def start_late():
  tx = jaxmotion.exchange("data", INT8, start=3)
  return optax.chain(tx, optax.sgd(0.1))


def change_level():
  levels = [INT8, codecs.identity()]
  tx = jaxmotion.exchange("data", levels, schedule=lambda count: count % 2)
  return optax.chain(tx, optax.sgd(0.1))


def freeze_bias():
  parts = {"late": start_late(), "frozen": optax.set_to_zero()}
  return optax.partition(parts, {"w": "late", "b": "frozen"})


GRID = mesh_of(2, 2)
CASES = {
  "start": (start_late, {}),
  "level": (change_level, {}),
  "onebit_adam": (lambda: presets.onebit_adam("data", 0.1), {}),
  "partition": (freeze_bias, {}),
  "sharded": (start_late, dict(specs={"w": P(None, "model"), "b": P()})),
}


@pytest.mark.parametrize("name", CASES)
def test_branches_wait_for_the_loss(name):
  make, options = CASES[name]
  mesh = GRID if options else MESH
  for tx in (make(), jaxmotion.delayed(make())):
    init, step = jaxmotion.make_train_step(loss_fn, tx, mesh, **options)
    assert not trace(step, jax.eval_shape(init, PARAMS), BATCH)


def test_branches_wait_for_batch_statistics_and_fragments_for_the_loss():
  outer = optax.chain(jaxmotion.exchange("data", INT8), optax.sgd(1.0))
  fragments = jaxmotion.local_updates(optax.sgd(0.1), outer, every=2)
  stats = dict(model_state="mean", mean_loss=False)
  for loss, tx, mean, options in (
    (normalized_loss, start_late(), [jnp.zeros(8)], stats),
    (loss_fn, fragments, [], {}),
  ):
    init, step = jaxmotion.make_train_step(loss, tx, MESH, **options)
    assert not trace(step, jax.eval_shape(init, PARAMS, *mean), BATCH)


def test_this_test_finds_a_sum_beside_a_branch():
  def beside(x):
    y = jax.lax.cond(
      x[0] > 0, lambda x: jax.lax.psum(x, "data"), lambda x: 4 * x, x
    )
    return y, jax.lax.psum(2 * x, "data")

  jaxpr = jax.make_jaxpr(beside, axis_env=[("data", 4)])(jnp.ones(2))
  assert list(unordered_pairs(jaxpr)) == [("cond", "psum")]
