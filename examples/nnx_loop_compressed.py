"""Trains a module of NNX with an optimizer and metrics, updated in place.

Gradients travel in 8 bits, with error feedback.

  python -m examples.nnx_loop_compressed
"""

import jax
import optax
from flax import nnx

import jaxmotion.nnx
from examples.parts import (
  NnxNetwork,
  cross_entropy,
  run_trainer,
)


def loss_fn(model, batch):
  logits = model(batch["x"])
  return cross_entropy(logits, batch["y"]), logits


def train(batches, config):
  jax.set_mesh(config.mesh)
  model = NnxNetwork(config.features, rngs=nnx.Rngs(0))
  tx = optax.sgd(config.learning_rate, momentum=0.9)
  tx = optax.chain(jaxmotion.exchange("data", config.codec), tx)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
  )

  @nnx.jit
  def train_step(model, optimizer, metrics, batch):
    grad_fn = jaxmotion.nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    optimizer.update(model, grads)

  losses = []
  for batch in batches:
    train_step(model, optimizer, metrics, batch)
    losses.append(float(metrics.compute()["loss"]))
    metrics.reset()
  return nnx.state(model, nnx.Param), losses


if __name__ == "__main__":
  run_trainer(train)
