"""GPT in bfloat16 with dropout, its blocks in a loop or one by one."""

import functools

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import attention, task
from jaxmotion.core import Array, PyTree

_DROPPED = 0.1


def make_transformer(
  wrap: task.Wrap = task.run_plain,
  *,
  layers: int = 24,
  width: int = 1024,
  heads: int = 16,
  batch: int = 8,
  length: int = 1024,
  flash: bool = False,
  unroll: bool = False,
) -> task.Task:
  """Returns the blocks of a GPT with the mean square of their output."""
  # Embeddings and logits are left out. Parameters are float32, activations
  # bfloat16; layer norms and the softmax are computed in float32.
  attend = attention.attend_blocks if flash else attention.attend_all
  block = wrap(functools.partial(_run_block, attend=attend, heads=heads))

  def loss_fn(params: PyTree, batch: dict[str, Array]) -> Array:
    x, key = batch["x"], batch["key"]
    if unroll:
      for i in range(layers):
        own = jax.tree.map(lambda a, i=i: a[i], params)
        x = block(own, x, jax.random.fold_in(key, i))
    else:

      def body(x: Array, row: tuple[PyTree, Array]) -> tuple[Array, None]:
        own, i = row
        return block(own, x, jax.random.fold_in(key, i)), None

      x, _ = lax.scan(body, x, (params, jnp.arange(layers)))
    return jnp.mean(x.astype(jnp.float32) ** 2)

  sizes = {
    **{"qkv": (width, 3 * width), "out": (width, width)},
    **{"up": (width, 4 * width), "down": (4 * width, width)},
    **{name: (width,) for name in ("scale1", "bias1", "scale2", "bias2")},
  }
  params = task.stack_shapes(layers, sizes)
  inputs = {
    "x": jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16),
    "key": jax.eval_shape(lambda: jax.random.key(0)),
  }
  return task.Task(loss_fn, params, inputs)


def _run_block(
  params: PyTree, x: Array, key: Array, *, attend: attention.Attend, heads: int
) -> Array:
  """Adds attention, then a perceptron, each after a layer norm."""
  keys = jax.random.split(key, 3)
  *shape, width = x.shape
  h = _normalize(x, params["scale1"], params["bias1"])
  qkv = checkpoint_name(_project(h, params["qkv"]), "qkv")
  parts = qkv.reshape(*shape, 3 * heads, width // heads)
  q, k, v = jnp.split(parts, 3, axis=2)
  y = attend(q, k, v, functools.partial(_drop, keys[0]))
  y = checkpoint_name(y.reshape(x.shape), "attention")
  y = checkpoint_name(_project(y, params["out"]), "out")
  x = x + _drop(keys[1], y)
  h = _normalize(x, params["scale2"], params["bias2"])
  up = checkpoint_name(_project(h, params["up"]), "up")
  down = _project(nn.gelu(up), params["down"])
  return x + _drop(keys[2], checkpoint_name(down, "down"))


def _project(x: Array, kernel: Array) -> Array:
  return x @ kernel.astype(x.dtype)


def _normalize(x: Array, scale: Array, bias: Array) -> Array:
  x32 = x.astype(jnp.float32)
  mean = x32.mean(-1, keepdims=True)
  variance = ((x32 - mean) ** 2).mean(-1, keepdims=True)
  y = (x32 - mean) * lax.rsqrt(variance + 1e-5)
  return (y * scale + bias).astype(x.dtype)


def _drop(key: Array, x: Array) -> Array:
  keep = jax.random.bernoulli(key, 1 - _DROPPED, x.shape)
  return jnp.where(keep, x / (1 - _DROPPED), 0).astype(x.dtype)
