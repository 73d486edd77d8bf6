"""Trains a convolutional network of Equinox on a sharded batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))


class CNN(eqx.Module):
  layers: list

  def __init__(self, key):
    keys = jax.random.split(key, 3)
    self.layers = [
      eqx.nn.Conv2d(1, 3, kernel_size=3, key=keys[0]),
      eqx.nn.MaxPool2d(kernel_size=2),
      jax.nn.relu,
      jnp.ravel,
      eqx.nn.Linear(243, 32, key=keys[1]),
      jax.nn.sigmoid,
      eqx.nn.Linear(32, 4, key=keys[2]),
      jax.nn.log_softmax,
    ]

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def compute_loss(model, x, y):
  predicted = jax.vmap(model)(x)
  picked = jnp.take_along_axis(predicted, jnp.expand_dims(y, 1), axis=1)
  return -jnp.mean(picked)


def train(steps):
  model = CNN(jax.random.key(0))
  tx = optax.adamw(1e-2)

  @eqx.filter_jit(donate="all")
  def make_step(model, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(compute_loss)(model, x, y)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss

  model = eqx.filter_shard(model, NamedSharding(MESH, P()))
  opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
  rng, log = np.random.default_rng(0), []
  for _ in range(steps):
    y = rng.integers(0, 4, 16)
    x = y[:, None, None, None] / 4 + rng.normal(size=(16, 1, 12, 12)) / 4
    x, y = eqx.filter_shard((x.astype("f"), y), NamedSharding(MESH, P("data")))
    model, opt_state, loss = make_step(model, opt_state, x, y)
    log.append(jax.device_get({"loss": loss}))
  return eqx.filter(model, eqx.is_inexact_array), log
