"""Trains a recurrent network with dropout, whose keys each worker folds.

python -m examples.recurrent_dropout
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from examples.parts import (
  HIDDEN,
  cross_entropy,
  init_matrix,
  init_params,
  run_trainer,
)


def run_network(params, x, key):
  def cell(h, column):
    return jnp.tanh(column @ params["u"] + h @ params["cell"]), None

  columns = x.T[:, :, None]
  start = jnp.tile(jnp.zeros_like(columns[0]), HIDDEN)
  h, _ = jax.lax.scan(cell, start, columns)
  keep = jax.random.bernoulli(key, 0.9, h.shape)
  return jnp.where(keep, h / 0.9, 0) @ params["last"]


def train(batches, config):
  mesh = config.mesh
  tx = optax.sgd(config.learning_rate, momentum=0.9)

  @jax.jit
  def train_step(params, opt_state, batch, key):
    def loss_fn(params):
      return cross_entropy(run_network(params, batch["x"], key), batch["y"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  last = init_params(HIDDEN)["last"]
  cell = init_matrix(2, HIDDEN, HIDDEN)
  params = {"u": jnp.full((1, HIDDEN), 0.3), "cell": cell, "last": last}
  opt_state = tx.init(params)
  losses = []
  for step, batch in enumerate(batches):
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    key = jax.random.fold_in(jax.random.key(2, impl="unsafe_rbg"), step)
    params, opt_state, loss = train_step(params, opt_state, batch, key)
    losses.append(float(loss))
  return params, losses


if __name__ == "__main__":
  run_trainer(train)
