"""Networks of images: a transformer of patches, and a ConvNeXt of Flax."""

import functools
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import attention, task, transformer
from jaxmotion.core import Array, PyTree

_CLASSES = 1000


def make_vision_transformer(
  wrap: task.Wrap = task.run_plain,
  *,
  layers: int = 12,
  width: int = 768,
  heads: int = 12,
  batch: int = 64,
  image: int = 224,
  patch: int = 16,
) -> task.Task:
  """Returns a classifier of written-out blocks with dropout, in bfloat16."""
  attend = functools.partial(attention.attend_all, causal=False)
  block = wrap(
    functools.partial(transformer.run_block, attend=attend, heads=heads)
  )

  def loss_fn(params: PyTree, batch: dict[str, Array]) -> Array:
    x = task.project(batch["patches"], params["embed"])
    x = x + params["places"].astype(x.dtype)
    for i, own in enumerate(params["blocks"]):
      x = block(own, x, jax.random.fold_in(batch["key"], i))
    x = x.astype(jnp.float32).mean(1)
    return _cross_entropy(x @ params["classes"], batch["labels"])

  count, channels = (image // patch) ** 2, 3 * patch**2
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  sizes = {n: shape(*s) for n, s in transformer.list_sizes(width).items()}
  params = {
    **{"embed": shape(channels, width), "places": shape(count, width)},
    **{"blocks": [sizes] * layers, "classes": shape(width, _CLASSES)},
  }
  inputs = {
    "patches": jax.ShapeDtypeStruct((batch, count, channels), jnp.bfloat16),
    "labels": jax.ShapeDtypeStruct((batch,), jnp.int32),
    "key": jax.eval_shape(lambda: jax.random.key(0)),
  }
  return task.Task(loss_fn, params, inputs)


def make_convnext(
  wrap: task.Wrap = task.run_plain,
  *,
  blocks: int = 3,
  width: int = 96,
  batch: int = 32,
  image: int = 224,
) -> task.Task:
  """Returns a ConvNeXt of Linen modules, in float32."""
  # The third of four resolutions has three times as many blocks as others.
  counts = [blocks, blocks, 3 * blocks, blocks]
  widths = [width << i for i in range(len(counts))]
  stems = [
    flax.linen.Conv(n, (size, size), (size, size))
    for n, size in zip(widths, [4, 2, 2, 2], strict=True)
  ]
  modules = [_ConvBlock(n) for n in widths]
  run_blocks = [wrap(module.apply) for module in modules]
  head = flax.linen.Dense(_CLASSES)

  def loss_fn(params: PyTree, batch: dict[str, Array]) -> Array:
    x: Any = batch["pixels"]
    for own, stem, run_block in zip(
      params[:-1], stems, run_blocks, strict=True
    ):
      x = stem.apply(own["stem"], x)
      for block in own["blocks"]:
        x = run_block(block, x)
    logits: Any = head.apply(params[-1], x.mean((1, 2)))
    return _cross_entropy(logits, batch["labels"])

  pixels = jax.ShapeDtypeStruct((batch, image, image, 3), jnp.float32)

  def init(key: Array, x: Any) -> list[PyTree]:
    params: list[PyTree] = []
    for stem, module, count in zip(stems, modules, counts, strict=True):
      x, own = stem.init_with_output(key, x)
      params.append({"stem": own, "blocks": [module.init(key, x)] * count})
    return [*params, head.init(key, x.mean((1, 2)))]

  params = jax.eval_shape(init, jax.random.key(0), pixels)
  labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
  return task.Task(loss_fn, params, {"pixels": pixels, "labels": labels})


class _ConvBlock(flax.linen.Module):
  """A convolution of each channel, then a perceptron of its channels."""

  width: int

  @flax.linen.compact
  def __call__(self, x: Array) -> Array:
    y = flax.linen.Conv(self.width, (7, 7), feature_group_count=self.width)(x)
    y = flax.linen.LayerNorm()(checkpoint_name(y, "conv"))
    up = checkpoint_name(flax.linen.Dense(4 * self.width)(y), "up")
    y = flax.linen.Dense(self.width)(flax.linen.gelu(up))
    scale = self.param(
      "scale", flax.linen.initializers.constant(1e-6), (self.width,)
    )
    return x + checkpoint_name(y, "down") * scale


def _cross_entropy(logits: Array, labels: Array) -> Array:
  logs = jax.nn.log_softmax(logits)
  return -jnp.take_along_axis(logs, labels[:, None], 1).mean()
