"""AlexNet, VGG-A and ResNet-34 as lists of Flax modules, one per stage.

The layers are those that `make_network` describes. Unlike there, batch norm
keeps running statistics, convolutions before it have no bias, and padding is
"SAME". At 224 pixels and width 1 the networks have the shapes of their papers:
63.8, 129.6 and 21.4 million weights for 201 classes. Below 128 pixels the first
layers shrink the image less. The weights of a stage share one precision; a
stage is a layer, or a block of ResNet. There is no dropout, so that a stage
depends on its parameters and its input alone.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models import catalog, classic, initial, layers
from experiments.models.network import Network
from jaxmotion.core import ShapedLike

_HE = initial.draw_kernel(2.0)


class Conv(nnx.Module):
  """A convolution, a ReLU and, if asked for, max pooling."""

  def __init__(
    self,
    inputs: int,
    outputs: int,
    kernel: int = 3,
    *,
    stride: int = 1,
    padding: str = "SAME",
    pool: int = 0,
    rngs: nnx.Rngs,
  ):
    self.pool = pool
    self.conv = nnx.Conv(
      inputs,
      outputs,
      (kernel, kernel),
      strides=stride,
      padding=padding,
      kernel_init=_HE,
      rngs=rngs,
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `(batch, height, width, inputs)` to `(batch, ..., outputs)`."""
    y = nnx.relu(self.conv(x))
    return max_pool(y, self.pool) if self.pool else y


class Dense(nnx.Module):
  """A fully connected layer of each flattened example."""

  def __init__(
    self, inputs: int, outputs: int, *, relu: bool = True, rngs: nnx.Rngs
  ):
    self.relu = relu
    self.dense = nnx.Linear(inputs, outputs, kernel_init=_HE, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `(batch, ...)` to `(batch, outputs)`."""
    y = self.dense(x.reshape(x.shape[0], -1))
    return nnx.relu(y) if self.relu else y


class Normed(nnx.Module):
  """A convolution without bias, then batch norm."""

  def __init__(
    self,
    inputs: int,
    outputs: int,
    kernel: int,
    *,
    stride: int = 1,
    rngs: nnx.Rngs,
  ):
    self.conv = nnx.Conv(
      inputs,
      outputs,
      (kernel, kernel),
      strides=stride,
      use_bias=False,
      kernel_init=_HE,
      rngs=rngs,
    )
    self.norm = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `(batch, height, width, inputs)` to `(batch, ..., outputs)`."""
    return self.norm(self.conv(x))


class Stem(nnx.Module):
  """The first layers of ResNet, which shrink a large image to a quarter."""

  def __init__(self, inputs: int, outputs: int, large: bool, *, rngs: nnx.Rngs):
    self.large = large
    kernel, stride = (7, 2) if large else (3, 1)
    self.normed = Normed(inputs, outputs, kernel, stride=stride, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps images to the first block's input."""
    y = nnx.relu(self.normed(x))
    if not self.large:
      return y
    edge = ((0, 0), (1, 1), (1, 1), (0, 0))
    # Zeros are no larger than what a ReLU returns: they win no maximum.
    return max_pool(jnp.pad(y, edge), 3)


class Block(nnx.Module):
  """A basic ResNet block: two convolutions and a shortcut."""

  def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs):
    self.first = Normed(inputs, outputs, 3, stride=stride, rngs=rngs)
    self.second = Normed(outputs, outputs, 3, rngs=rngs)
    same = inputs == outputs and stride == 1
    self.shortcut = (
      None if same else Normed(inputs, outputs, 1, stride=stride, rngs=rngs)
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `(batch, height, width, inputs)` to `(batch, ..., outputs)`."""
    shortcut = self.shortcut(x) if self.shortcut else x
    return nnx.relu(self.second(nnx.relu(self.first(x))) + shortcut)


class Head(nnx.Module):
  """The mean over height and width, then a linear classifier."""

  def __init__(self, inputs: int, classes: int, *, rngs: nnx.Rngs):
    self.dense = Dense(inputs, classes, relu=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `(batch, height, width, inputs)` to logits `(batch, classes)`."""
    return self.dense(x.mean(axis=(1, 2)))


def max_pool(x: jax.Array, window: int) -> jax.Array:
  """Returns max pooling with stride 2 and without padding."""
  # The maximum is taken over shifted images: its gradient consists of pads,
  # which every backend runs in parallel.
  height, width = ((n - window) // 2 + 1 for n in x.shape[1:3])
  shifts = itertools.product(range(window), repeat=2)
  parts = (
    x[:, i : i + 2 * height - 1 : 2, j : j + 2 * width - 1 : 2]
    for i, j in shifts
  )
  y = next(parts)
  for part in parts:
    y = jnp.maximum(y, part)
  return y


def _alexnet(size: int, classes: int, width: float) -> Network:
  """Returns AlexNet as A2DTWP has it: with four fully connected layers."""
  # Valid padding for large images; a small one becomes 32 pixels.
  stem = (11, 4, 0) if size >= classic.LARGE else (5, size // 32, 2)
  return catalog.make_network(
    "alexnet",
    image=size,
    classes=classes,
    width=width,
    channels=(64, 192, 384, 384, 256),
    hidden=3,
    stem=stem,
  )


def _vgg_a(size: int, classes: int, width: float) -> Network:
  return catalog.make_network("vgg11", image=size, classes=classes, width=width)


def _resnet34(size: int, classes: int, width: float) -> Network:
  return catalog.make_network(
    "resnet34", image=size, classes=classes, width=width
  )


NETWORKS: dict[str, Callable[[int, int, float], Network]] = {
  "alexnet": _alexnet,
  "vgg_a": _vgg_a,
  "resnet34": _resnet34,
}
"""Function that describes a network, by its name in a configuration."""


def build_stages(
  network: str,
  *,
  size: int,
  channels: int,
  classes: int,
  width: float,
  seed: int,
) -> list[nnx.Module]:
  """Returns the stages of a network, from images to logits."""
  if network not in NETWORKS:
    raise ValueError(
      f"`config.model` must be one of {', '.join(NETWORKS)}, got {network!r}."
    )
  if size < 32 or size % 32:
    raise ValueError(
      f"`config.image_size` must be a multiple of 32, got {size}."
    )
  if not width > 0:
    raise ValueError(f"`config.width` must be greater than 0, got {width}.")
  rngs = nnx.Rngs(seed)
  x: ShapedLike = jax.ShapeDtypeStruct((1, size, size, channels), "float32")
  modules = []
  for stage in NETWORKS[network](size, classes, width).stages:
    for _ in range(stage.repeats):
      modules.append(_build_module(stage.block, x, rngs))
      x = layers.output_shape(stage.block, x)
  return modules


def _build_module(
  block: layers.Layer, x: ShapedLike, rngs: nnx.Rngs
) -> nnx.Module:
  """Returns the Flax module of a stage's block, for an input's shape."""
  inputs = x.shape[-1]
  match block:
    case layers.Chain(layers=(layers.Conv() as conv, *pools)):
      return _build_conv(conv, inputs, pools, rngs)
    case layers.Conv():
      return _build_conv(block, inputs, (), rngs)
    case layers.Dense():
      size = math.prod(x.shape[1:])
      return Dense(size, block.features, relu=block.relu, rngs=rngs)
    case layers.Add(body=layers.Chain(layers=(layers.Conv() as first, _))):
      return Block(inputs, first.features, first.stride, rngs)
    case layers.Chain(layers=(layers.Call(), layers.Dense() as dense)):
      return Head(inputs, dense.features, rngs=rngs)
  raise TypeError(f"`block` must be one of the staged networks', got {block}.")


def _build_conv(
  conv: layers.Conv, inputs: int, pools: Sequence[layers.Layer], rngs: nnx.Rngs
) -> Conv | Stem:
  """Returns the module of a convolution and of the pooling after it."""
  if conv.norm:
    return Stem(inputs, conv.features, bool(pools), rngs=rngs)
  (size, _) = layers.as_pair(conv.size)
  window = sum(
    pool.window for pool in pools if isinstance(pool, layers.MaxPool)
  )
  return Conv(
    inputs,
    conv.features,
    size,
    stride=conv.stride,
    padding="VALID" if conv.padding == 0 else "SAME",
    pool=window,
    rngs=rngs,
  )
