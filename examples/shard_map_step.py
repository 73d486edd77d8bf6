"""Trains by a step that is mapped over the workers by hand.

python -m examples.shard_map_step
"""

import functools

import jax
import optax
from jax.sharding import PartitionSpec as P

from examples.parts import (
  apply_network,
  cross_entropy,
  init_params,
  run_trainer,
)


def train(batches, config):
  mesh = config.mesh
  tx = optax.sgd(config.learning_rate, momentum=0.9)
  params = init_params(config.features)
  opt_state = tx.init(params)
  specs = P(), P(), P("data")
  maps = {"mesh": mesh, "in_specs": specs, "out_specs": (*specs[:2], P())}

  @jax.jit
  @functools.partial(jax.shard_map, **maps)
  def train_step(params, opt_state, batch):
    def loss_fn(params):
      loss = cross_entropy(apply_network(params, batch["x"]), batch["y"])
      return jax.lax.pmean(loss, "data")

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  losses = []
  for batch in batches:
    params, opt_state, loss = train_step(params, opt_state, batch)
    losses.append(float(loss))
  return params, losses


if __name__ == "__main__":
  run_trainer(train)
