"""Losses, meshes and batches as other people's training code has them."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, perfmodel, transforms, wire

PARAMS = {"u": np.full((3, 4), 0.3, np.float32), "w": np.eye(4, dtype="f") / 2}
BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 5, 3)).astype(np.float32),
  "y": np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32),
}
MESHES = {
  "auto": ((4,), (AxisType.Auto,)),
  "explicit": ((4,), (AxisType.Explicit,)),
  "explicit_model": ((4, 2), (AxisType.Explicit,) * 2),
  "auto_model": ((4, 2), (AxisType.Auto,) * 2),
}


def make_mesh(kind):
  shape, types = MESHES[kind]
  return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=types)


def loop_loss(params, batch):
  """A recurrent network, a sum over parts and a branch, all from constants."""

  def cell(h, x):
    return jnp.tanh(x @ params["u"] + h @ params["w"]), None

  start = jnp.zeros((batch["x"].shape[0], 4))
  h, _ = lax.scan(cell, start, jnp.swapaxes(batch["x"], 0, 1))
  total = lax.fori_loop(
    0, 4, lambda i, t: t + jnp.mean((h - batch["y"])[:, i] ** 2), 0.0
  )
  return lax.cond(jnp.isfinite(total), lambda t: t, lambda t: 1.0, total)


def plain_step(loss_fn):
  """SGD by the mean over workers, without any map."""
  shards = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), BATCH)
  grad_fn = jax.jit(jax.grad(loss_fn))
  grads = [
    grad_fn(PARAMS, {name: a[i] for name, a in shards.items()})
    for i in range(4)
  ]
  mean = jax.tree.map(lambda *g: sum(g) / 4, *grads)
  return jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, mean)


@pytest.fixture(scope="module")
def expected():
  return plain_step(loop_loss)


@pytest.mark.parametrize("kind", MESHES)
def test_loops_and_branches_train_on_every_mesh(kind, expected):
  mesh = make_mesh(kind)
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(loop_loss, tx, mesh, donate=False)
  state = init(PARAMS)
  placed = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
  within = jax.set_mesh(mesh) if "model" in kind else contextlib.nullcontext()
  with within:
    for batch in (BATCH, jax.tree.map(jnp.asarray, BATCH), placed):
      new, _ = step(state, batch)
      for a, b in zip(
        jax.tree.leaves(new.params), jax.tree.leaves(expected), strict=True
      ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        assert a.sharding.is_fully_replicated


def test_nothing_is_summed_at_full_precision_beside_the_exchange():
  codec = codecs.feedback(codecs.uniform(bits=8, block=4))
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(loop_loss, tx, make_mesh("explicit"))
  state = init(PARAMS)
  traced = wire.step_bytes(step, state, BATCH)
  compiled = wire.compiled_bytes(step.lower(state, BATCH).compile())
  data = perfmodel.builtin_platform("ethernet_1gbit").resize(data=4)
  exchanged = perfmodel.exchange_ledger(PARAMS, data, "data", codec)
  assert traced.total_bytes == compiled.total_bytes
  # The mean of the loss is the only other collective.
  assert traced.total_bytes - exchanged.total_bytes < 8


def test_a_constraint_on_the_other_axis_stays_the_models():
  mesh = make_mesh("auto_model")

  def make_loss(constrain):
    def loss_fn(params, batch):
      h = constrain(jnp.tanh(batch["x"][:, 0] @ params["u"]))
      return jnp.mean((h @ params["w"] - batch["y"]) ** 2)

    return loss_fn

  loss_fn = make_loss(
    lambda h: lax.with_sharding_constraint(
      h, NamedSharding(mesh, P(None, "model"))
    )
  )
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(loss_fn, tx, mesh)
  params = step(init(PARAMS), BATCH)[0].params
  plain = plain_step(make_loss(lambda h: h))
  np.testing.assert_allclose(params["w"], plain["w"], rtol=1e-5, atol=1e-6)


def test_a_state_for_ones_own_step_is_that_of_a_made_step():
  mesh = make_mesh("explicit")
  codec = codecs.feedback(codecs.sign())
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.adam(0.1))
  init, _ = jaxmotion.make_train_step(loop_loss, tx, mesh)
  expected = init(PARAMS).opt_state
  state = transforms.init_state(tx, PARAMS, mesh)
  assert jax.tree.structure(state) == jax.tree.structure(expected)
  for a, b in zip(
    jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
  ):
    assert a.sharding == b.sharding
    np.testing.assert_array_equal(a, b)
  with pytest.raises(ValueError, match="`axis_name` must be an axis"):
    transforms.init_state(tx, PARAMS, mesh, axis_name="date")


def test_only_floating_point_scalars_are_averaged():
  def loss_fn(params, batch):
    logits = batch["x"][:, 0] @ params["u"]
    aux = {
      "count": jnp.sum(logits > 0),
      "logits": logits,
      "mean": logits.mean(),
    }
    return jnp.mean(logits**2), aux

  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(
    loss_fn, tx, make_mesh("auto"), has_aux=True
  )
  _, (loss, aux) = step(init(PARAMS), BATCH)
  logits = (BATCH["x"][:, 0] @ PARAMS["u"]).reshape(4, 2, 4)
  np.testing.assert_allclose(loss, (logits**2).mean(), rtol=1e-6)
  np.testing.assert_allclose(aux["mean"], logits.mean(), rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(aux["logits"], logits, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(aux["count"], (logits > 0).sum((1, 2)))
