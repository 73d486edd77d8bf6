"""Arguments, records and keys of a training step."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, transforms
from tests.meshes import mesh_of
from tests.transforms.helpers import assert_close

MESH = mesh_of(4)
PARAMS = {"w": np.ones((4, 2), np.float32)}
BATCH = {"x": np.ones((8, 4), np.float32)}
TX = optax.chain(jaxmotion.exchange("data"), optax.trace(0.9), optax.sgd(0.1))


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"]) ** 2)


@functools.cache
def make_steps(donate):
  return jaxmotion.make_train_step(loss_fn, TX, MESH, donate=donate)


def test_arguments_that_were_donated_are_refused_by_name():
  init, step = make_steps(donate=True)
  old = init(PARAMS)
  new, _ = step(old, BATCH)
  message = "`state/params/w` must be .* still exists"
  with pytest.raises(ValueError, match=message):
    step(new._replace(params=old.params), BATCH)
  with pytest.raises(ValueError, match="`state/opt_state/0/count` must be"):
    step(new._replace(opt_state=old.opt_state), BATCH)
  with pytest.raises(ValueError, match="`params/w` must be"):
    init(old.params)
  step(new, BATCH)


def test_an_array_given_twice_is_refused_by_name():
  init, step = make_steps(donate=True)
  state = init(PARAMS)
  moments = {"w": state.opt_state[1].trace["w"]}
  message = "`state/opt_state/1/trace/w` .* `state/params/w`"
  with pytest.raises(ValueError, match=message):
    step(state._replace(params=moments), BATCH)
  message = "`batch/x` .* array of `state/params/w`"
  with pytest.raises(ValueError, match=message):
    step(state, {"x": state.params["w"]})


def test_without_donation_a_step_may_be_run_again():
  init, step = make_steps(donate=False)
  state = init(PARAMS)
  work = step.compute(state, BATCH)
  donating = make_steps(donate=True)[1]
  found = step(state, BATCH), step(state, BATCH), donating(state, BATCH)
  for other in found[1:]:
    jax.tree.map(np.testing.assert_array_equal, found[0], other)
  for call in (
    lambda: step(state, BATCH),
    lambda: step.compute(state, BATCH),
    lambda: step.update(state, work),
  ):
    with pytest.raises(
      ValueError, match="`state/params/w` must be .* still ex"
    ):
      call()
  donating.update(found[0][0], work)
  assert found[0][0].params["w"].is_deleted()


def test_a_model_state_is_given_where_one_is_kept():
  for model_state, given, message in (
    (None, (np.zeros(2),), "`model_state` must be None .* got ndarray"),
    ("mean", (), "`model_state` must go with .* got NoneType for 'mean'"),
  ):
    init, _ = jaxmotion.make_train_step(
      loss_fn, TX, MESH, model_state=model_state
    )
    with pytest.raises(ValueError, match=message):
      init(PARAMS, *given)


def test_a_state_of_other_workers_is_refused():
  codec = codecs.feedback(codecs.sign())
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))
  two = mesh_of(2)
  init, _ = jaxmotion.make_train_step(loss_fn, tx, two)
  _, step = jaxmotion.make_train_step(loss_fn, tx, MESH)
  message = "`state` must be that of 4 workers.*codec_state.* \\(2,\\)"
  with pytest.raises(ValueError, match=message):
    step(jax.device_get(init(PARAMS)), BATCH)


def dropout_loss(params, batch, key):
  """A loss of inputs that are dropped by a mask, and the mask."""
  mask = jax.random.bernoulli(key, 0.5, batch.shape)
  return jnp.mean(jnp.where(mask, batch * params, 0)), mask


def expected_masks(key, count):
  step_key = jax.random.fold_in(key, count)
  return [
    jax.random.bernoulli(jax.random.fold_in(step_key, worker), 0.5, (2, 5))
    for worker in range(4)
  ]


EXCHANGED = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.0))
WRAPPED = transforms.skip_nonfinite(
  optax.chain(
    optax.masked(jaxmotion.exchange("data"), True),
    optax.inject_hyperparams(optax.adam)(0.1),
  ),
  "data",
)


@pytest.mark.parametrize(
  ("tx", "kind", "make_key"),
  [
    (EXCHANGED, AxisType.Explicit, jax.random.key),
    (jaxmotion.sharded("data", optax.sgd(0.0)), AxisType.Auto, jax.random.key),
    (WRAPPED, AxisType.Auto, jax.random.PRNGKey),
  ],
  ids=["exchange", "sharded", "wrapped"],
)
def test_every_worker_and_step_draws_its_own_mask(tx, kind, make_key):
  mesh = mesh_of(4, kind=kind)
  init, step = jaxmotion.make_train_step(dropout_loss, tx, mesh, has_aux=True)
  state = init(jnp.ones(()))
  key, masks = make_key(7), []
  for count in range(2):
    state, (_, mask) = step(state, np.ones((8, 5), np.float32), key=key)
    np.testing.assert_array_equal(mask, expected_masks(key, count))
    masks += [m.tobytes() for m in np.asarray(mask)]
  assert len(set(masks)) == 8


def test_a_batch_of_keys_is_refused():
  init, step = make_steps(donate=False)
  keys = jax.random.split(jax.random.key(0))
  with pytest.raises(TypeError, match=r"`key` must be .*jax\.random\.key"):
    step(init(PARAMS), BATCH, key=keys)


# Losses, meshes and batches as other people's training code has them.
CHAIN = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
CELLS = {"u": np.full((3, 4), 0.3, np.float32), "w": np.eye(4, dtype="f") / 2}
SERIES = {
  "x": np.random.default_rng(0).normal(size=(8, 5, 3)).astype(np.float32),
  "y": np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32),
}
MESHES = {
  "auto": MESH,
  "explicit_model": mesh_of(4, 2, kind=AxisType.Explicit),
}


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


@functools.cache
def plain_step(loss_fn):
  """SGD by the mean over workers, without any map."""
  shards = jax.tree.map(lambda a: a.reshape(4, 2, *a.shape[1:]), SERIES)
  grads = jax.vmap(jax.grad(loss_fn), (None, 0))
  return jax.tree.map(
    lambda p, g: p - 0.1 * g.mean(0), CELLS, jax.jit(grads)(CELLS, shards)
  )


@pytest.mark.parametrize("kind", MESHES)
def test_loops_and_branches_train_on_every_mesh(kind):
  mesh = MESHES[kind]
  init, step = jaxmotion.make_train_step(loop_loss, CHAIN, mesh, donate=False)
  state = init(CELLS)
  placed = jax.device_put(SERIES, jax.NamedSharding(mesh, P("data")))
  within = jax.set_mesh(mesh) if "model" in kind else contextlib.nullcontext()
  with within:
    for batch in (SERIES, jax.tree.map(jnp.asarray, SERIES), placed):
      new, _ = step(state, batch)
      assert_close(new.params, plain_step(loop_loss), rtol=1e-6, atol=1e-7)
      for a in jax.tree.leaves(new.params):
        assert a.sharding.is_fully_replicated


def test_only_floating_point_scalars_are_averaged():
  def own_loss(params, batch):
    logits = batch["x"][:, 0] @ params["u"]
    aux = {
      "count": jnp.sum(logits > 0),
      "logits": logits,
      "mean": logits.mean(),
    }
    return jnp.mean(logits**2), aux

  init, step = jaxmotion.make_train_step(own_loss, CHAIN, MESH, has_aux=True)
  _, (loss, aux) = step(init(CELLS), SERIES)
  logits = (SERIES["x"][:, 0] @ CELLS["u"]).reshape(4, 2, 4)
  np.testing.assert_allclose(loss, (logits**2).mean(), rtol=1e-6)
  np.testing.assert_allclose(aux["mean"], logits.mean(), rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(aux["logits"], logits, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(aux["count"], (logits > 0).sum((1, 2)))
