"""Trains a Linen TrainState whose batch statistics are kept beside it.

Gradients travel in 8 bits, with error feedback.

  python -m examples.linen_train_state_compressed
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmotion
from examples.parts import (
  LinenNetwork,
  cross_entropy,
  run_trainer,
)
from jaxmotion import bind_mesh, exchange


class TrainState(train_state.TrainState):
  """Parameters, optimizer state and batch statistics."""

  batch_stats: Any = None


def train(batches, config):
  mesh = config.mesh
  tx = optax.sgd(config.learning_rate, momentum=0.9)
  tx = bind_mesh(optax.chain(exchange("data", config.codec), tx), mesh)
  model = LinenNetwork(normalize=True)
  init = jax.jit(model.init)
  variables = init(jax.random.key(0), jnp.zeros((1, config.features)))
  state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)

  @jax.jit
  def train_step(state, batch):
    def loss_fn(params):
      variables = {"params": params, "batch_stats": state.batch_stats}
      logits, updates = state.apply_fn(
        variables, batch["x"], mutable=["batch_stats"]
      )
      return cross_entropy(logits, batch["y"]), updates["batch_stats"]

    grad_fn = jaxmotion.value_and_grad(loss_fn, has_aux=True)
    (loss, stats), grads = grad_fn(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss

  losses = []
  for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    state, loss = train_step(state, batch)
    losses.append(float(loss))
  return (state.params, state.batch_stats), losses


if __name__ == "__main__":
  run_trainer(train)
