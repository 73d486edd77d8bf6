"""Trains a residual network with batch statistics, as Flax's ImageNet example.

The gradients of microbatches are added up in a loop.
"""

import operator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))


class ResidualNetwork(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    x = nn.Conv(8, (3, 3), strides=2, use_bias=False)(x)
    y = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
    y = nn.Conv(8, (3, 3), use_bias=False)(y)
    y = nn.BatchNorm(use_running_average=not train)(y)
    x = nn.max_pool(nn.relu(x + y), (2, 2), strides=(2, 2))
    return nn.Dense(4)(jnp.mean(x, axis=(1, 2)))


class TrainState(train_state.TrainState):
  batch_stats: Any


def train(steps):
  model = ResidualNetwork()
  tx = optax.sgd(0.05, momentum=0.9, nesterov=True)

  def train_step(state, batch):
    def loss_fn(params, batch_stats, batch):
      logits, new_state = state.apply_fn(
        {"params": params, "batch_stats": batch_stats},
        batch["image"],
        True,
        mutable=["batch_stats"],
      )
      one_hot = jax.nn.one_hot(batch["label"], 4)
      loss = jnp.mean(optax.softmax_cross_entropy(logits, one_hot))
      weight_l2 = sum(
        jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1
      )
      return loss + 1e-4 * 0.5 * weight_l2, (new_state["batch_stats"], logits)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    stats, total, correct = state.batch_stats, None, 0
    for i in range(2):
      part = {name: x[8 * i : 8 * i + 8] for name, x in batch.items()}
      (loss, (stats, logits)), grads = grad_fn(state.params, stats, part)
      half = jax.tree.map(lambda g: g / 2, grads)
      total = half if total is None else jax.tree.map(operator.add, total, half)
      correct += jnp.sum(jnp.argmax(logits, -1) == part["label"])
    state = state.apply_gradients(grads=total, batch_stats=stats)
    return state, {"loss": loss, "accuracy": correct / 16}

  with jax.set_mesh(MESH):
    image = jnp.ones((1, 8, 8, 3))
    variables = model.init(jax.random.key(0), image, False)
    variables = jax.device_put(variables, NamedSharding(MESH, P()))
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    step = jax.jit(train_step, donate_argnums=0)
    rng, log = np.random.default_rng(0), []
    centers = rng.normal(size=(4, 8, 8, 3))
    for _ in range(steps):
      label = rng.integers(0, 4, 16)
      image = centers[label] + rng.normal(size=(16, 8, 8, 3))
      batch = {"image": image.astype(np.float32), "label": label}
      batch = jax.device_put(batch, NamedSharding(MESH, P("data")))
      state, metrics = step(state, batch)
      log.append(jax.device_get(metrics))
  return state.params, log
