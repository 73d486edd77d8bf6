"""Arguments and records of a data-parallel step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jaxmotion

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
PARAMS = {"w": np.ones((4, 2), np.float32)}
BATCH = {"x": np.ones((8, 4), np.float32)}
TX = optax.chain(jaxmotion.exchange("data"), optax.trace(0.9), optax.sgd(0.1))


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"]) ** 2)


@functools.cache
def make_steps(donate):
  return jaxmotion.data_parallel(loss_fn, TX, MESH, donate=donate)


def test_arguments_that_were_donated_are_refused_by_name():
  init, step = make_steps(donate=True)
  params, state = init(PARAMS)
  new_params, new_state, _ = step(params, state, BATCH)
  with pytest.raises(ValueError, match="`params/w` must be .* still exists"):
    step(params, new_state, BATCH)
  with pytest.raises(ValueError, match="`opt_state/0/count` must be"):
    step(new_params, state, BATCH)
  with pytest.raises(ValueError, match="`params/w` must be"):
    init(params)
  step(new_params, new_state, BATCH)


def test_an_array_given_twice_is_refused_by_name():
  init, step = make_steps(donate=True)
  params, state = init(PARAMS)
  with pytest.raises(ValueError, match="`opt_state/1/trace/w` .* `params/w`"):
    step({"w": state[1].trace["w"]}, state, BATCH)
  with pytest.raises(ValueError, match="`batch/x` .* array of `params/w`"):
    step(params, state, {"x": params["w"]})


def test_without_donation_a_step_may_be_run_again():
  init, step = make_steps(donate=False)
  params, state = init(PARAMS)
  first, second = step(params, state, BATCH), step(params, state, BATCH)
  donating = make_steps(donate=True)[1](params, state, BATCH)
  for other in (second, donating):
    for a, b in zip(
      jax.tree.leaves(first), jax.tree.leaves(other), strict=True
    ):
      np.testing.assert_array_equal(a, b)
  with pytest.raises(ValueError, match="`params/w` must be .* still exists"):
    step(params, state, BATCH)


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
  init, step = jaxmotion.data_parallel(loss_fn, tx, MESH)
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  _, state, _ = step(*init(PARAMS), {"x": x})
  norm = optax.tree.norm(jax.grad(loss_fn)(PARAMS, {"x": x}))
  np.testing.assert_allclose(optax.tree.get(state, "norm"), norm, rtol=1e-6)
