"""Trains a model that is a pytree itself, as the modules of Equinox are.

Gradients travel in 8 bits, with error feedback.

  python -m examples.module_pytree_compressed
"""

import functools

import jax
import optax

import jaxmotion
from examples.parts import (
  ModuleNetwork,
  cross_entropy,
  init_params,
  run_trainer,
)


@jaxmotion.value_and_grad
def compute_loss(model, x, y):
  return cross_entropy(model(x), y)


def train(batches, config):
  jax.set_mesh(config.mesh)
  model = ModuleNetwork(**init_params(config.features))
  tx = optax.sgd(config.learning_rate, momentum=0.9)
  tx = optax.chain(jaxmotion.exchange("data", config.codec), tx)
  opt_state = tx.init(model)

  @functools.partial(jax.jit, donate_argnames="model")
  def make_step(model, opt_state, x, y):
    loss, grads = compute_loss(model, x, y)
    updates, opt_state = tx.update(grads, opt_state, model)
    return optax.apply_updates(model, updates), opt_state, loss

  losses = []
  for batch in batches:
    x, y = batch["x"], batch["y"]
    model, opt_state, loss = make_step(model, opt_state, x, y)
    losses.append(float(loss))
  return model, losses


if __name__ == "__main__":
  run_trainer(train)
