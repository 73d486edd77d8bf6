"""Arguments and records of a training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
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
  first, second = step(state, BATCH), step(state, BATCH)
  donating = make_steps(donate=True)[1](state, BATCH)
  for other in (second, donating):
    jax.tree.map(np.testing.assert_array_equal, first, other)
  message = "`state/params/w` must be .* still exists"
  with pytest.raises(ValueError, match=message):
    step(state, BATCH)


def test_what_is_no_scheme_is_refused():
  message = "`scheme` must be a Scheme or an optax transformation, got 'sgd'"
  with pytest.raises(TypeError, match=message):
    jaxmotion.make_train_step(loss_fn, "sgd", MESH)


@pytest.mark.parametrize("as_list", (False, True))
def test_what_is_no_state_is_refused(as_list):
  init, step = make_steps(donate=False)
  state = init(PARAMS)
  given = list(state) if as_list else state.params
  with pytest.raises(TypeError, match="`state` must be the TrainState that"):
    step(given, BATCH)


@pytest.mark.parametrize(
  ("model_state", "given", "message"),
  [
    (None, (np.zeros(2),), "`model_state` must be None .* got ndarray"),
    ("mean", (), "`model_state` must go with .* got NoneType for 'mean'"),
  ],
)
def test_a_model_state_is_given_where_one_is_kept(model_state, given, message):
  init, _ = jaxmotion.make_train_step(
    loss_fn, TX, MESH, model_state=model_state
  )
  with pytest.raises(ValueError, match=message):
    init(PARAMS, *given)


def test_a_state_of_other_workers_is_refused():
  codec = codecs.feedback(codecs.sign())
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))
  two = Mesh(np.array(jax.devices()[:2]), ("data",))
  init, _ = jaxmotion.make_train_step(loss_fn, tx, two)
  _, step = jaxmotion.make_train_step(loss_fn, tx, MESH)
  message = "`state` must be that of 4 workers.*codec_state.* \\(2,\\)"
  with pytest.raises(ValueError, match=message):
    step(jax.device_get(init(PARAMS)), BATCH)


def test_a_state_made_outside_of_a_program_may_be_donated():
  tx = jaxmotion.exchange("data")
  update = jax.shard_map(
    lambda g, state: tx.update(g, state),
    mesh=MESH,
    in_specs=(P("data"), P()),
    out_specs=(P(), P()),
  )
  state = tx.init({"w": jnp.ones((4, 2))})
  step = jax.jit(update, donate_argnums=1)
  _, state = step({"w": jnp.ones((16, 2))}, state)
  assert int(state.count) == 1


def test_the_norm_of_the_mean_gradient_is_read_behind_the_exchange():
  tx = optax.chain(
    jaxmotion.exchange("data"),
    optax.snapshot("norm", optax.tree.norm),
    optax.sgd(0.1),
  )
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH)
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  state, _ = step(init(PARAMS), {"x": x})
  norm = optax.tree.norm(jax.grad(loss_fn)(PARAMS, {"x": x}))
  found = optax.tree.get(state.opt_state, "norm")
  np.testing.assert_allclose(found, norm, rtol=1e-6)
