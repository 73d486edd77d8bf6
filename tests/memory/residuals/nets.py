"""Small blocks of the kinds that are trained, and comparisons of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DIMS = ("NHWC", "HWIO", "NHWC")


def norm(x, axes):
  x = x - x.mean(axes, keepdims=True)
  return x * lax.rsqrt((x * x).mean(axes, keepdims=True) + 1e-5)


def convolve(x, kernel):
  return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, DIMS)


def mlp_block(p, x):
  return x + jnp.tanh(jax.nn.gelu(x @ p["in"]) @ p["out"])


def conv_block(p, x):
  for kernel in (p["in"], p["out"]):
    x = jax.nn.relu(norm(convolve(x, kernel), (0, 1, 2)))
  return x


def attention_block(p, x):
  h = norm(x, -1)
  q, k, v = jnp.split(h @ p["in"], 3, -1)
  scores = jnp.einsum("btd,bsd->bts", q, k) / q.shape[-1] ** 0.5
  causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
  weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
  return x + jax.nn.silu(jnp.einsum("bts,bsd->btd", weights, v) @ p["out"])


def pool_block(p, x):
  x = jax.nn.relu(convolve(x, p["in"]))
  window, pads = (1, 3, 3, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
  x = lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 2, 2, 1), pads)
  return jax.nn.relu(convolve(x, p["out"]))


def normal(seed, *shape):
  values = np.random.default_rng(seed).standard_normal(shape, np.float32)
  return jnp.asarray(0.3 * values)


def make(name):
  """Returns a block, its parameters and an input."""
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
  """Returns the sum of squares of a block's output."""
  return lambda p, x: jnp.sum(block(p, x) ** 2)


def stacked(p, count):
  """Returns the parameters of equal blocks, as rows of one tree."""
  return jax.tree.map(lambda a: jnp.asarray(np.stack([a] * count)), p)


def looped(block):
  """Returns the sum of squares of the output of a scan of blocks."""

  def run(params, x):
    y, _ = lax.scan(lambda x, p: (block(p, x), None), x, params)
    return jnp.sum(y**2)

  return run


def gradients(fn, *args):
  """Returns the value and the gradients of the first two arguments, jitted."""
  return jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(*args)


@functools.cache
def plain_gradients(name):
  """Returns `gradients` of a scan of three blocks without our transform."""
  block, p, x = make(name)
  return gradients(looped(block), stacked(p, 3), x)


def relu_block(p, x):
  """A block whose ReLU makes many zeros."""
  return jax.nn.relu(x @ p["in"] - 0.2) @ p["out"]


@functools.cache
def plain_relu_gradients():
  """Returns value and gradient of a scan of three `relu_block`."""
  _, p, x = make("mlp")
  return jax.jit(jax.value_and_grad(looped(relu_block)))(stacked(p, 3), x)


def same(a, b):
  """Says whether two trees have the same bits, but for signs of zeros."""
  return all(
    np.array_equal(x, y)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def distance(a, b):
  """Returns the largest relative distance of any leaf."""

  def relative(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return np.linalg.norm(np.ravel(x - y)) / np.linalg.norm(np.ravel(x))

  return max(
    float(relative(x, y))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )
