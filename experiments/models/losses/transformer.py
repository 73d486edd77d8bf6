"""GPT in bfloat16 with dropout, its blocks in a loop or one by one."""

import functools

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import attention, task
from jaxmotion.core import Array, PyTree


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
  block = wrap(functools.partial(run_block, attend=attend, heads=heads))

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

  params = task.stack_shapes(layers, list_sizes(width))
  inputs = {
    "x": jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16),
    "key": jax.eval_shape(lambda: jax.random.key(0)),
  }
  return task.Task(loss_fn, params, inputs)


def list_sizes(width: int) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of a block's parameters."""
  return {
    **{"qkv": (width, 3 * width), "out": (width, width)},
    **{"up": (width, 4 * width), "down": (4 * width, width)},
    **{name: (width,) for name in ("scale1", "bias1", "scale2", "bias2")},
  }


def run_block(
  params: PyTree, x: Array, key: Array, *, attend: attention.Attend, heads: int
) -> Array:
  """Adds attention, then a perceptron, each after a layer norm."""
  keys = jax.random.split(key, 3)
  *shape, width = x.shape
  h = task.normalize_layer(x, params["scale1"], params["bias1"])
  qkv = checkpoint_name(task.project(h, params["qkv"]), "qkv")
  parts = qkv.reshape(*shape, 3 * heads, width // heads)
  q, k, v = jnp.split(parts, 3, axis=2)
  y = attend(q, k, v, functools.partial(task.drop_randomly, keys[0]))
  y = checkpoint_name(y.reshape(x.shape), "attention")
  y = checkpoint_name(task.project(y, params["out"]), "out")
  x = x + task.drop_randomly(keys[1], y)
  h = task.normalize_layer(x, params["scale2"], params["bias2"])
  up = checkpoint_name(task.project(h, params["up"]), "up")
  down = task.project(nn.gelu(up), params["down"])
  return x + task.drop_randomly(keys[2], checkpoint_name(down, "down"))
