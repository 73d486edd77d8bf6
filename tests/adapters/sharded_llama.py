"""Trains a llama over data, parameters and tensors, in the style of EasyLM."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = jax.sharding.Mesh(
  np.array(jax.devices()[:8]).reshape(2, 2, 2), ("dp", "fsdp", "mp")
)
RULES = (
  ("wte/embedding", P("mp", "fsdp")),
  ("(wq|wk|wv|w1|w3|lm_head)/kernel", P("fsdp", "mp")),
  ("(wo|w2)/kernel", P("mp", "fsdp")),
  (".*", P()),
)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    def dense(name, size, x):
      return nn.Dense(size, use_bias=False, name=name)(x)

    h = nn.RMSNorm(name="attention_norm")(x)
    heads = [dense(n, 16, h).reshape(*h.shape[:2], 2, 8) for n in ("wq", "wk")]
    heads.append(dense("wv", 16, h).reshape(*h.shape[:2], 2, 8))
    spec = P(("dp", "fsdp"), None, "mp")
    q, k, v = (with_sharding_constraint(a, spec) for a in heads)
    causal = nn.make_causal_mask(x[..., 0])
    y = nn.dot_product_attention(q, k, v, mask=causal)
    x = x + dense("wo", 16, y.reshape(x.shape))
    h = nn.RMSNorm(name="ffn_norm")(x)
    return x + dense("w2", 16, nn.silu(dense("w1", 32, h)) * dense("w3", 32, h))


class Llama(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(32, 16, name="wte")(tokens)
    for i in range(2):
      x = nn.remat(Block)(name=f"h{i}")(x)
    x = nn.RMSNorm(name="ln_f")(x)
    return nn.Dense(32, use_bias=False, name="lm_head")(x)


def match_partition_rules(params):
  def find_spec(name):
    return next(spec for rule, spec in RULES if re.search(rule, name))

  flat = flatten_dict(params, sep="/")
  return unflatten_dict({name: find_spec(name) for name in flat}, sep="/")


def cross_entropy_loss_and_accuracy(logits, tokens, valid):
  length = jnp.maximum(jnp.sum(valid, axis=-1), 1e-10)
  picked = jnp.take_along_axis(nn.log_softmax(logits), tokens[..., None], -1)
  picked = jnp.where(valid > 0.0, picked[..., 0], 0.0)
  correct = jnp.where(valid > 0.0, jnp.argmax(logits, -1) == tokens, False)
  accuracy = jnp.mean(jnp.sum(correct, axis=-1) / length)
  return -jnp.mean(jnp.sum(picked, axis=-1) / length), accuracy


def train(steps):
  model = Llama()
  tx = optax.chain(
    optax.clip_by_global_norm(1.0), optax.sgd(0.05, momentum=0.9)
  )

  def train_step(state, batch):
    batch = with_sharding_constraint(batch, P(("dp", "fsdp")))

    def loss_and_accuracy(params):
      logits = state.apply_fn({"params": params}, batch["input_tokens"])
      return cross_entropy_loss_and_accuracy(
        logits, batch["target_tokens"], batch["loss_masks"]
      )

    grad_fn = jax.value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads)
    norm = optax.tree.norm(state.params)
    return state, {"loss": loss, "accuracy": accuracy, "param_norm": norm}

  with jax.set_mesh(MESH):
    tokens = jnp.ones((4, 8), jnp.int32)
    params = model.init(jax.random.key(0), tokens)["params"]
    params = jax.tree.map(
      lambda x, spec: jax.device_put(x, NamedSharding(MESH, spec)),
      params,
      match_partition_rules(params),
    )
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    step = jax.jit(train_step, donate_argnums=0)
    rng, log = np.random.default_rng(0), []
    for _ in range(steps):
      tokens = (rng.integers(0, 32, (8, 1)) + 3 * np.arange(9)) % 32
      mask = (np.arange(8) < rng.integers(3, 9, (8, 1))).astype(np.float32)
      batch = {"input_tokens": tokens[:, :-1], "target_tokens": tokens[:, 1:]}
      batch = jax.device_put(
        {**batch, "loss_masks": mask}, NamedSharding(MESH, P(("dp", "fsdp")))
      )
      state, metrics = step(state, batch)
      log.append(jax.device_get(metrics))
  return state.params, log
