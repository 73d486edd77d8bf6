"""Trains a small decoder with `z` loss, in the style of nanodo."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec as P

MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))


@dataclasses.dataclass(frozen=True)
class DoConfig:
  D: int = 16
  H: int = 2
  L: int = 8
  N: int = 2
  V: int = 32
  F: int = 32


class TBlock(nn.Module):
  docfg: DoConfig

  @nn.compact
  def __call__(self, in_BxLxD):
    cfg = self.docfg
    x_BxLxD = nn.LayerNorm(use_bias=False)(in_BxLxD)
    multilinear = partial(
      nn.DenseGeneral, axis=-1, features=(cfg.H, cfg.D // cfg.H), use_bias=False
    )
    q, k, v = (multilinear(name=name)(x_BxLxD) for name in "qkv")
    logits = jnp.einsum("blhk,bmhk->bhlm", q / (cfg.D // cfg.H) ** 0.5, k)
    mask = jnp.tril(jnp.ones((x_BxLxD.shape[1],) * 2, jnp.bool_))
    att = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(jnp.float32).min))
    out = jnp.einsum("bhlm,bmhk->blhk", att, v)
    x_BxLxD = nn.DenseGeneral(cfg.D, axis=(-2, -1), use_bias=False)(out)
    x_BxLxD += in_BxLxD
    z_BxLxD = nn.LayerNorm(use_bias=False)(x_BxLxD)
    z_BxLxF = nn.gelu(nn.Dense(cfg.F, use_bias=False)(z_BxLxD))
    return x_BxLxD + nn.Dense(cfg.D, use_bias=False)(z_BxLxF)


class TransformerDo(nn.Module):
  docfg: DoConfig

  @nn.compact
  def __call__(self, y_BxL):
    cfg = self.docfg
    embed = nn.Embed(cfg.V, cfg.D)
    y_BxLxD = embed(y_BxL)
    y_BxLxD += nn.Embed(cfg.L, cfg.D)(jnp.arange(y_BxL.shape[1]))
    for _ in range(cfg.N):
      y_BxLxD = nn.remat(TBlock)(cfg)(y_BxLxD)
    return embed.attend(nn.LayerNorm(use_bias=False)(y_BxLxD))


def train(steps):
  schedule = optax.warmup_cosine_decay_schedule(0.0, 0.02, 4, 40)
  tx = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
  )
  model = TransformerDo(DoConfig())

  @partial(jax.jit, donate_argnames=("state",))
  def train_step(state, in_BxL):
    def loss_fn(params):
      x_BxL, y_BxL = in_BxL[:, :-1], in_BxL[:, 1:]
      weights = jnp.where(y_BxL != 0, 1, 0).astype(jnp.float32)
      logits_BxLxV = state.apply_fn({"params": params}, x_BxL)
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxLxV, y_BxL
      )
      total_z = jax.nn.logsumexp(logits_BxLxV, axis=-1)
      z_loss = jnp.sum(jnp.square(total_z) * weights) / jnp.sum(weights)
      loss = jnp.sum(losses * weights) / jnp.sum(weights)
      logits_norm = jnp.sqrt(jnp.mean(jnp.square(logits_BxLxV)))
      aux = {"z_loss": z_loss, "logits_norm": logits_norm}
      return loss + 1e-4 * z_loss, aux | {"tokens": jnp.sum(weights)}

    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    aux["grad_norm"] = optax.tree.norm(grads)
    aux["param_norm"] = optax.tree.norm(state.params)
    return state, aux | {"loss": loss, "lr": schedule(state.step)}

  def init(rng):
    params = model.init(rng, jnp.ones((1, 8), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

  with jax.set_mesh(MESH):
    state = jax.jit(init)(jax.random.key(0))
  rng, log = np.random.default_rng(0), []
  for _ in range(steps):
    tokens = 1 + (rng.integers(0, 31, (8, 1)) + 3 * np.arange(9)) % 31
    tokens = tokens * (np.arange(9) < rng.integers(3, 10, (8, 1)))
    batch = jax.device_put(tokens, NamedSharding(MESH, P("data")))
    state, metrics = train_step(state, batch)
    log.append(jax.device_get(metrics))
  return state.params, log
