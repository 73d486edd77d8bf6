"""Trains a decoder on padded text, in the style of Flax's lm1b example."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import common_utils, train_state
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))


class Decoder(nn.Module):
  @nn.compact
  def __call__(self, tokens, train):
    embed = nn.Embed(32, 16)
    x = embed(tokens)
    mask = nn.combine_masks(
      nn.make_causal_mask(tokens),
      nn.make_attention_mask(tokens > 0, tokens > 0),
    )
    y = nn.LayerNorm(use_bias=False)(x)
    y = nn.MultiHeadDotProductAttention(2, use_bias=False)(y, mask=mask)
    x = x + nn.Dropout(0.1, deterministic=not train)(y)
    x = x + nn.Dense(16)(nn.relu(nn.Dense(32)(nn.LayerNorm()(x))))
    return embed.attend(nn.LayerNorm()(x))


def compute_cross_entropy(logits, targets, weights):
  soft = common_utils.onehot(targets, 32, on_value=0.9, off_value=0.1 / 31)
  loss = -jnp.sum(soft * nn.log_softmax(logits), axis=-1)
  return jnp.sum(loss * weights), weights.sum()


def train(steps):
  model = Decoder()
  tx = optax.adamw(optax.linear_schedule(0.0, 1e-2, 5), 0.9, 0.98, eps=1e-4)

  @jax.jit
  def train_step(state, batch, dropout_key):
    weights = jnp.where(batch["targets"] > 0, 1.0, 0.0)
    key = jax.random.fold_in(dropout_key, state.step)

    def loss_fn(params):
      logits = state.apply_fn(
        {"params": params}, batch["inputs"], True, rngs={"dropout": key}
      )
      loss, total = compute_cross_entropy(logits, batch["targets"], weights)
      return loss / total, logits

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads)
    correct = (logits.argmax(-1) == batch["targets"]) * weights
    metrics = {"loss": loss, "correct": correct.sum(), "tokens": weights.sum()}
    return state, metrics

  tokens = jnp.ones((4, 8), jnp.int32)
  params = model.init(jax.random.key(0), tokens, False)["params"]
  params = jax.device_put(params, NamedSharding(MESH, P()))
  state = train_state.TrainState.create(
    apply_fn=model.apply, params=params, tx=tx
  )
  rng, log = np.random.default_rng(0), []
  for _ in range(steps):
    tokens = 1 + (rng.integers(0, 31, (8, 1)) + 3 * np.arange(9)) % 31
    tokens = np.where(np.arange(9) < rng.integers(3, 10, (8, 1)), tokens, 0)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch = jax.device_put(batch, NamedSharding(MESH, P("data")))
    state, metrics = train_step(state, batch, jax.random.key(1))
    log.append(jax.device_get(metrics))
  return state.params, log
