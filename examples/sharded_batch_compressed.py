"""Trains by `jit` on a batch that `device_put` has split over the devices.

Gradients travel in 8 bits, with error feedback.

  python -m examples.sharded_batch_compressed
"""

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmotion
from examples.parts import (
  apply_network,
  cross_entropy,
  init_params,
  run_trainer,
)


def train(batches, config):
  mesh = config.mesh
  replicated = NamedSharding(mesh, P())
  split = NamedSharding(mesh, P("data"))
  tx = optax.sgd(config.learning_rate, momentum=0.9)
  tx = optax.chain(jaxmotion.exchange("data", config.codec), tx)

  def loss_fn(params, batch):
    return cross_entropy(apply_network(params, batch["x"]), batch["y"])

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = jaxmotion.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, {"loss": loss, "norm": optax.tree.norm(params)}

  params = jax.device_put(init_params(config.features), replicated)
  opt_state = tx.init(params)
  losses = []
  for batch in batches:
    batch = jax.device_put(batch, split)
    params, opt_state, metrics = train_step(params, opt_state, batch)
    losses.append(float(metrics["loss"]))
  return params, losses


if __name__ == "__main__":
  run_trainer(train)
