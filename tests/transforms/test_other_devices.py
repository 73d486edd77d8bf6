"""Arrays that are bound to other devices than those of the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import transforms

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
BATCH = np.arange(32, dtype=np.float32).reshape(16, 2) / 32


def loss_fn(params, batch):
  return jnp.mean((batch @ transforms.gather_params(params)["w"]) ** 2)


def plain_loss(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2)


def train_by_exchange(params, batch):
  init, step = jaxmotion.make_train_step(
    plain_loss, optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1)), MESH
  )
  return step(init(params), batch)[0].params


def train_with_model_state(params, batch):
  def loss_fn(params, state, batch):
    return plain_loss(params, batch) + 0 * state["w"].sum(), state

  init, step = jaxmotion.make_train_step(
    loss_fn,
    optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1)),
    MESH,
    model_state="mean",
  )
  return step(init(params, {"w": params["w"] + 0}), batch)[0].params


def train_by_local_updates(params, batch):
  init, step = jaxmotion.make_train_step(
    plain_loss,
    jaxmotion.local_updates(
      optax.sgd(0.1),
      optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0)),
      every=1,
    ),
    MESH,
  )
  return step(init(params), batch)[0].params


def train_fully_sharded(params, batch):
  init, step = jaxmotion.make_train_step(
    loss_fn, jaxmotion.fully_sharded(optax.sgd(0.1)), MESH
  )
  return step(init(params), batch)[0].params


def train_a_step_of_ones_own(params, batch):
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  tx = jaxmotion.bind_mesh(tx, MESH)

  @jaxmotion.parallelize_step(MESH)
  def step(params, opt_state, batch):
    grads = jax.grad(plain_loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return step(params, tx.init(params), batch)[0]


TRAINERS = [
  train_by_exchange,
  train_with_model_state,
  train_by_local_updates,
  train_fully_sharded,
  train_a_step_of_ones_own,
]


@pytest.mark.parametrize("train", TRAINERS)
@pytest.mark.parametrize("device", [0, 7])
def test_parameters_of_another_device_are_put_on_the_mesh(train, device):
  params = {"w": np.ones((2, 3), np.float32)}
  there = jax.device_put(params, jax.devices()[device])
  found, expected = train(there, BATCH), train(params, BATCH)
  np.testing.assert_array_equal(found["w"], expected["w"])
  assert found["w"].sharding.device_set == set(MESH.devices.flat)


@pytest.mark.parametrize("train", TRAINERS)
def test_a_batch_on_another_device_is_refused_by_name(train):
  batch = jax.device_put(BATCH, jax.devices()[0])
  with pytest.raises(
    ValueError, match="`batch` must be on the 4 .*got an array on cpu:0: give"
  ):
    train({"w": jnp.ones((2, 3))}, batch)


def test_a_batch_on_the_mesh_is_taken():
  batch = jax.device_put(BATCH, jax.NamedSharding(MESH, P("data")))
  params = {"w": jnp.ones((2, 3))}
  found = train_by_exchange(params, batch)
  expected = train_by_exchange(params, BATCH)
  np.testing.assert_array_equal(found["w"], expected["w"])
