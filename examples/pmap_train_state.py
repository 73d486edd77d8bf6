"""Trains as Flax's ImageNet example does: `pmap` of a replicated TrainState.

python -m examples.pmap_train_state
"""

import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax.training import common_utils
from flax.training.train_state import TrainState

from examples.parts import (
  LinenNetwork,
  cross_entropy,
  run_trainer,
)


def create_state(config):
  model = LinenNetwork()
  params = jax.jit(model.init)(
    jax.random.key(0), jnp.zeros((1, config.features))
  )
  tx = optax.sgd(config.learning_rate, momentum=0.9)
  return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
  def loss_fn(params):
    return cross_entropy(state.apply_fn(params, batch["x"]), batch["y"])

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  grads = jax.lax.pmean(grads, "data")
  return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "data")


def train(batches, config):
  state = jax_utils.replicate(create_state(config))
  p_train_step = jax.pmap(train_step, axis_name="data")
  losses = []
  for batch in batches:
    state, loss = p_train_step(state, common_utils.shard(batch))
    losses.append(float(loss[0]))
  return state.params, losses


if __name__ == "__main__":
  run_trainer(train)
