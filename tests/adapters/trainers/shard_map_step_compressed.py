"""Trains by a step that is mapped over the workers by hand."""

import jax
import optax

from jaxmotion import bind_mesh, exchange, parallelize_step
from tests.adapters.trainers.networks import (
  apply_network,
  cross_entropy,
  init_params,
)


def train(batches, config):
  mesh = config.mesh
  tx = optax.sgd(config.learning_rate, momentum=0.9)
  tx = bind_mesh(optax.chain(exchange("data", config.codec), tx), mesh)

  @parallelize_step(mesh)
  def train_step(params, opt_state, batch):
    def loss_fn(params):
      loss = cross_entropy(apply_network(params, batch["x"]), batch["y"])
      return jax.lax.pmean(loss, "data")

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_params(config.features)
  opt_state = tx.init(params)
  losses = []
  for batch in batches:
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
  return params, losses
