"""Trains a decoder of NNX on packed text, in the style of Flax's gemma."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import common_utils, train_state
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = jax.sharding.Mesh(
  np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor")
)
BATCH = NamedSharding(MESH, P(("data", "fsdp")))
SPECS = {
  "embed": P("tensor", "fsdp"),
  "qkv": P(None, "tensor", "fsdp", None),
  "out": P("tensor", None, "fsdp"),
  "gate": P(None, "fsdp", "tensor"),
  "down": P("tensor", "fsdp"),
  "norm": P(),
}


class TrainState(train_state.TrainState):
  graphdef: Any = None


class Decoder(nnx.Module):
  def __init__(self, rngs):
    def make(*shape):
      scale = shape[-2] ** -0.5
      return nnx.Param(scale * jax.random.normal(rngs.params(), shape))

    self.embed, self.norm = make(32, 16), nnx.Param(jnp.zeros(16))
    self.qkv, self.out = make(3, 2, 16, 8), make(2, 8, 16)
    self.gate, self.down = make(2, 16, 32), make(32, 16)

  def __call__(self, tokens, positions, mask):
    def normalize(x):
      mean = jnp.mean(x**2, axis=-1, keepdims=True)
      return x * jax.lax.rsqrt(mean + 1e-6) * (1 + self.norm[...])

    x = self.embed[...][tokens] * 4.0
    angles = positions[..., None, None] / 100.0 ** jnp.linspace(0, 1, 4)
    q, k, v = jnp.einsum("btd,cndh->cbtnh", normalize(x), self.qkv[...])

    def rotate(x):
      a, b = jnp.split(x, 2, axis=-1)
      sin, cos = jnp.sin(angles), jnp.cos(angles)
      return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    logits = jnp.einsum("btnh,bsnh->bnts", rotate(q), rotate(k)) / 8**0.5
    logits = jnp.where(mask[:, None], jnp.tanh(logits / 50) * 50, -2e38)
    encoded = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)
    x = x + jnp.einsum("btnh,nhd->btd", encoded, self.out[...])
    gate, up = jnp.einsum("btd,cdf->cbtf", normalize(x), self.gate[...])
    x = x + (jax.nn.gelu(gate) * up) @ self.down[...]
    return normalize(x) @ self.embed[...].T


def compute_weighted_cross_entropy(logits, targets, weights, smoothing):
  low = smoothing / (logits.shape[-1] - 1)
  soft = common_utils.onehot(
    targets, logits.shape[-1], on_value=1.0 - smoothing, off_value=low
  )
  loss = -jnp.sum(soft * jax.nn.log_softmax(logits), axis=-1)
  return (loss * weights).sum(), weights.sum()


def train_step(state, batch, learning_rate_fn):
  inputs, segments = batch["inputs"], batch["segments"]
  weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
  causal = jnp.tril(jnp.ones((inputs.shape[1],) * 2, bool))
  mask = (segments[:, :, None] == segments[:, None]) & causal

  def loss_fn(params):
    module = nnx.merge(state.graphdef, params)
    logits = module(inputs, batch["positions"], mask)
    loss, weight_sum = compute_weighted_cross_entropy(
      logits[:, :-1], inputs[:, 1:], weights[:, 1:], 0.1
    )
    return loss / weight_sum, (logits, weight_sum)

  step = state.step
  grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
  (loss, (logits, weight_sum)), grads = grad_fn(state.params)
  new_state = state.apply_gradients(grads=grads)
  hits = (jnp.argmax(logits[:, :-1], -1) == inputs[:, 1:]) * weights[:, 1:]
  return new_state, {
    "loss": loss,
    "accuracy": hits.sum() / weight_sum,
    "denominator": weight_sum,
    "learning_rate": learning_rate_fn(step),
  }


def pack(rng):
  lengths = rng.integers(3, 7, (8, 1))
  place = np.arange(12)
  second = place >= lengths
  positions = np.where(second, place - lengths, place)
  tokens = 1 + (rng.integers(0, 31, (8, 1)) + (3 + 2 * second) * positions) % 31
  filled = place < rng.integers(8, 13, (8, 1))
  return {
    "inputs": tokens * filled,
    "positions": positions * filled,
    "segments": (1 + second) * filled,
  }


def _to_mesh(x):
  if isinstance(getattr(x, "sharding", None), NamedSharding):
    return x
  return jax.device_put(x, NamedSharding(MESH, P()))


def train(steps):
  schedule = optax.linear_schedule(0.0, 0.02, 5)
  tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-6, weight_decay=0.1)
  graphdef, params = nnx.split(Decoder(nnx.Rngs(0)), nnx.Param)
  params = jax.tree.map_with_path(
    lambda path, x: jax.device_put(x, NamedSharding(MESH, SPECS[path[0].key])),
    params,
  )
  state = TrainState.create(
    apply_fn=graphdef.apply, params=params, tx=tx, graphdef=graphdef
  )
  state = jax.tree.map(_to_mesh, state)
  state_sharding = jax.tree.map(lambda x: x.sharding, state)
  jitted = jax.jit(
    train_step,
    in_shardings=(state_sharding, BATCH),
    out_shardings=(state_sharding, None),
    static_argnums=2,
    donate_argnums=0,
  )
  rng, log = np.random.default_rng(0), []
  for _ in range(steps):
    batch = jax.device_put(pack(rng), BATCH)
    state, metrics = jitted(state, batch, schedule)
    log.append(jax.device_get(metrics))
  return state.params, log
