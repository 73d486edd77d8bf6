"""Small functions of parameters and an input, of the kinds that are trained."""

import jax
import jax.numpy as jnp
from jax import lax

DIMS = ("NHWC", "HWIO", "NHWC")


def norm(x, axes):
  x = x - x.mean(axes, keepdims=True)
  return x * lax.rsqrt((x * x).mean(axes, keepdims=True) + 1e-5)


def mlp_block(p, x):
  return x + jnp.tanh(jax.nn.gelu(x @ p["in"]) @ p["out"])


def conv_block(p, x):
  for kernel in (p["in"], p["out"]):
    x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, DIMS)
    x = jax.nn.relu(norm(x, (0, 1, 2)))
  return x


def attention_block(p, x):
  h = norm(x, -1)
  q, k, v = jnp.split(h @ p["in"], 3, -1)
  scores = jnp.einsum("btd,bsd->bts", q, k) / q.shape[-1] ** 0.5
  causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
  weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
  return x + jax.nn.silu(jnp.einsum("bts,bsd->btd", weights, v) @ p["out"])


def pool_block(p, x):
  x = jax.nn.relu(
    lax.conv_general_dilated(x, p["in"], (1, 1), "SAME", None, None, DIMS)
  )
  window, pads = (1, 3, 3, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
  x = lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 2, 2, 1), pads)
  return jax.nn.relu(
    lax.conv_general_dilated(x, p["out"], (1, 1), "SAME", None, None, DIMS)
  )


def normal(seed, *shape):
  return 0.3 * jax.random.normal(jax.random.key(seed), shape)


def make(name):
  """(block, params, x)."""
  if name == "mlp":
    p = {"in": normal(1, 16, 32), "out": normal(2, 32, 16)}
    return mlp_block, p, normal(0, 256, 16)
  if name == "attention":
    p = {"in": normal(1, 16, 48), "out": normal(2, 16, 16)}
    return attention_block, p, normal(0, 4, 32, 16)
  block = {"conv": conv_block, "pool": pool_block}[name]
  p = {"in": normal(1, 3, 3, 8, 8), "out": normal(2, 3, 3, 8, 8)}
  return block, p, normal(0, 4, 16, 16, 8)


NAMES = ("mlp", "attention", "conv", "pool")


def squared(block):
  return lambda p, x: jnp.sum(block(p, x) ** 2)


def stacked(p, count):
  return jax.tree.map(lambda a: jnp.stack([a] * count), p)


def looped(block):
  def run(params, x):
    return jnp.sum(
      lax.scan(lambda x, p: (block(p, x), None), x, params)[0] ** 2
    )

  return run


def same(a, b):
  return all(
    bool((x == y).all())
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def distance(a, b):
  """The relative distance of the worst leaf."""
  return max(
    float(jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(x.ravel()))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )
