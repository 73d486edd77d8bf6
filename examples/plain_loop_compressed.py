"""Trains a dict of parameters on one device, in the plainest loop of optax.

Gradients travel in 8 bits, with error feedback.

  python -m examples.plain_loop_compressed
"""

import jax
import optax

import jaxmotion
from examples.parts import (
  apply_network,
  cross_entropy,
  init_params,
  run_trainer,
)


def train(batches, config):
  tx = optax.sgd(config.learning_rate, momentum=0.9)
  tx = optax.chain(jaxmotion.exchange("data", config.codec), tx)
  jax.set_mesh(config.mesh)

  @jax.jit
  def train_step(params, opt_state, batch):
    def loss_fn(params):
      return cross_entropy(apply_network(params, batch["x"]), batch["y"])

    loss, grads = jaxmotion.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = init_params(config.features)
  opt_state = tx.init(params)
  losses = []
  for batch in batches:
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
  return params, losses


if __name__ == "__main__":
  run_trainer(train)
