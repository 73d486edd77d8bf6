"""Trains a sharded model on sequences of unequal lengths, by `jit` alone.

python -m examples.sharded_model

Rules name the shards of each parameter, and the loss constrains activations. It
is the mean over all tokens that the mask leaves, wherever they are.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec as P

from examples.parts import init_params, run_trainer

RULES = (("first", P(None, "model")), ("last", P("model", None)))


def train(batches, config):
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model")
  )
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.sgd(config.learning_rate, momentum=0.9),
  )

  def shard(name, x):
    spec = next(spec for rule, spec in RULES if re.search(rule, name))
    return jax.device_put(x, NamedSharding(mesh, spec))

  def loss_fn(params, batch):
    h = jax.nn.relu(jnp.einsum("btf,fh->bth", batch["x"], params["first"]))
    whole = NamedSharding(mesh, P("data", None, "model"))
    h = with_sharding_constraint(h, whole)
    logits = jnp.einsum("bth,hc->btc", h, params["last"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    tokens = jnp.sum(batch["mask"])
    correct = (logits.argmax(-1) == batch["y"]) * batch["mask"]
    metrics = {"tokens": tokens, "accuracy": jnp.sum(correct) / tokens}
    return jnp.sum(losses * batch["mask"]) / tokens, metrics

  @jax.jit
  def train_step(state, batch):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, metrics), grads = grad_fn(state.params, batch)
    state = state.apply_gradients(grads=grads)
    return state, {**metrics, "loss": loss}

  params = init_params(config.features)
  params = {name: shard(name, x) for name, x in params.items()}
  state = TrainState.create(apply_fn=loss_fn, params=params, tx=tx)
  split = NamedSharding(mesh, P("data"))
  losses = []
  for batch in batches:
    batch = jax.device_put(make_sequences(batch), split)
    state, metrics = train_step(state, batch)
    losses.append(float(metrics["loss"]))
  return state.params, losses


def make_sequences(batch):
  """Returns sequences of examples, and a mask of their lengths."""
  order = np.arange(16)[:, None] + np.arange(8)
  x, y = (batch[name][order % 16] for name in ("x", "y"))
  lengths = 1 + (5 * np.arange(16)[:, None]) % 8
  mask = (np.arange(8) < lengths).astype(np.float32)
  return {"x": x, "y": y, "mask": mask}


if __name__ == "__main__":
  run_trainer(train)
