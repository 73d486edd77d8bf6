"""Uneven work of workers whose models are sharded over another axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, hetero
from tests.compilations import compilations

RNG = np.random.default_rng(0)
PARAMS = {
  "up": RNG.normal(size=(4, 8)).astype(np.float32) / 2,
  "down": RNG.normal(size=(8, 2)).astype(np.float32) / 2,
}
SPECS = {"up": P(None, "model"), "down": P("model")}
X = RNG.normal(size=(12, 4)).astype(np.float32)
INT8 = codecs.feedback(codecs.uniform(bits=8, block=8))


def losses(params, x):
  hidden = jnp.tanh(x @ params["up"])
  # Explicit axes want to be told where a product is whose sum they share.
  is_explicit = any(jax.typeof(params["down"]).sharding.spec)
  out = P(None, None) if is_explicit else None
  y = jnp.dot(hidden, params["down"], out_sharding=out)
  return jnp.sum((y - 1) ** 2, -1)


def loss_fn(params, microbatch):
  valid = microbatch["valid"]
  return jnp.sum(valid * losses(params, microbatch["x"])) / jnp.sum(valid)


def count_valid(microbatch):
  return jnp.sum(microbatch["valid"])


@pytest.mark.parametrize(
  ("kind", "codec", "tolerance"),
  [
    (AxisType.Auto, INT8, 0.02),
    (AxisType.Explicit, codecs.identity(), 1e-6),
  ],
)
def test_shards_are_updated_by_the_gradient_of_the_whole_batch(
  kind, codec, tolerance
):
  mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.adam(0.1))
  init, step = jaxmotion.make_train_step(
    loss_fn, tx, mesh, specs=SPECS, weight_fn=count_valid, microbatches=4
  )
  counts = (4, 2)
  x, valid = hetero.assign_microbatches(
    {"x": X}, counts, microbatch=2, max_microbatches=4
  )
  batch = x | {"valid": valid}
  state = init(PARAMS)
  params, plain = PARAMS, optax.adam(0.1)
  moments = plain.init(params)
  grad_fn = jax.jit(jax.grad(lambda p: jnp.mean(losses(p, X))))
  for i in range(2):
    if i:
      before = compilations()
    state, _ = step(state, batch, counts=counts)
    assert not i or compilations() == before
    updates, moments = plain.update(grad_fn(params), moments, params)
    params = optax.apply_updates(params, updates)
  for name, spec in SPECS.items():
    found, expected = state.params[name], np.asarray(params[name])
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    moment = optax.tree.get(state.opt_state, "mu")[name]
    for leaf in (found, moment):
      assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
  if kind == AxisType.Explicit:
    return
  # Each of four devices remembers the error of its shard.
  memory = jax.tree.leaves(state.opt_state[0].codec_state)
  assert {leaf.shape[0] for leaf in memory} == {4}
  # In two programs too, between which gradients stay sharded.
  work = step.compute(state, batch, counts=counts)
  up = work.grads["up"].sharding
  assert up.is_equivalent_to(NamedSharding(mesh, P("data", None, "model")), 3)
  assert work.weight.tolist() == [8, 4]
  step.update(state, work)
