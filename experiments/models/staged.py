"""AlexNet, VGG-A and ResNet-34 as lists of stages, at any input size and width.

At 224 pixels and width 1 they have the shapes of their papers: 63.8, 129.6 and
21.4 million weights for 201 classes. Below 128 pixels the first layers shrink
the image less. A stage is what has one precision: a layer, or a building block
of ResNet. There is no dropout, so that a stage is a function of its parameters
and its input alone.
"""

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

_LARGE = 128  # Pixels from which on the first layers are those of the papers.
_HE = nnx.initializers.he_normal()


class Conv(nnx.Module):
  """A convolution, ReLU and, if asked for, a maximum over windows.

  Args:
    inputs: channels.
    outputs: channels.
    kernel: height and width.
    stride: of the convolution.
    padding: "SAME" or "VALID".
    pool: height and width of the windows, two apart; 0 for none.
    rngs: for the initial parameters.
  """

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
  """A fully connected layer over all that an example has.

  Args:
    inputs: values an example has.
    outputs: width.
    relu: whether a ReLU follows.
    rngs: for the initial parameters.
  """

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
  """A convolution without bias, and batch norm."""

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
  """What ResNet does first: a quarter of a large image's size, or none."""

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
    return max_pool(jnp.pad(y, edge), 3)  # A ReLU's zeros do not win.


class Block(nnx.Module):
  """Two convolutions and a shortcut around them."""

  def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs):
    self.first = Normed(inputs, outputs, 3, stride=stride, rngs=rngs)
    self.second = Normed(outputs, outputs, 3, rngs=rngs)
    same = inputs == outputs and stride == 1
    self.shortcut = (
      None if same else Normed(inputs, outputs, 1, stride=stride, rngs=rngs)
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `(batch, height, width, inputs)` to `(batch, ..., outputs)`."""
    around = self.shortcut(x) if self.shortcut else x
    return nnx.relu(self.second(nnx.relu(self.first(x))) + around)


class Head(nnx.Module):
  """The mean over all places, and a classifier."""

  def __init__(self, inputs: int, classes: int, *, rngs: nnx.Rngs):
    self.dense = Dense(inputs, classes, relu=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps `(batch, height, width, inputs)` to logits `(batch, classes)`."""
    return self.dense(x.mean(axis=(1, 2)))


def max_pool(x: jax.Array, window: int) -> jax.Array:
  """The greatest value of every window, windows two apart, without padding.

  A maximum over shifted images: its gradient is made of pads, which every
  backend runs in parallel.

  Args:
    x: `(batch, height, width, channels)`.
    window: height and width.
  """
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


def _alexnet(
  size: int, channels: int, classes: int, width: float, rngs: nnx.Rngs
) -> Iterator[nnx.Module]:
  """AlexNet with the fourth fully connected layer that A2DTWP's has."""
  sizes = _scaled((64, 192, 384, 384, 256, 4096), width)
  a, b, c, d, e, wide = sizes
  if size >= _LARGE:
    side = (size - 11) // 4 + 1
    yield Conv(channels, a, 11, stride=4, padding="VALID", pool=3, rngs=rngs)
  else:
    side = 32
    yield Conv(channels, a, 5, stride=size // side, pool=3, rngs=rngs)
  for _ in range(3):
    side = (side - 3) // 2 + 1
  yield Conv(a, b, 5, pool=3, rngs=rngs)
  yield Conv(b, c, rngs=rngs)
  yield Conv(c, d, rngs=rngs)
  yield Conv(d, e, pool=3, rngs=rngs)
  yield Dense(side * side * e, wide, rngs=rngs)
  yield Dense(wide, wide, rngs=rngs)
  yield Dense(wide, wide, rngs=rngs)
  yield Dense(wide, classes, relu=False, rngs=rngs)


def _vgg_a(
  size: int, channels: int, classes: int, width: float, rngs: nnx.Rngs
) -> Iterator[nnx.Module]:
  """VGG-A: eight convolutions of 3 x 3, of which five halve the image."""
  outputs = _scaled((64, 128, 256, 256, 512, 512, 512, 512), width)
  halves = (2, 2, 0, 2, 0, 2, 0, 2)
  inputs = channels
  for output, pool in zip(outputs, halves, strict=True):
    yield Conv(inputs, output, pool=pool, rngs=rngs)
    inputs = output
  (wide,) = _scaled((4096,), width)
  yield Dense((size // 32) ** 2 * inputs, wide, rngs=rngs)
  yield Dense(wide, wide, rngs=rngs)
  yield Dense(wide, classes, relu=False, rngs=rngs)


def _resnet34(
  size: int, channels: int, classes: int, width: float, rngs: nnx.Rngs
) -> Iterator[nnx.Module]:
  """ResNet-34: 16 building blocks of two convolutions."""
  sizes = _scaled((64, 128, 256, 512), width)
  inputs = sizes[0]
  yield Stem(channels, inputs, size >= _LARGE, rngs=rngs)
  for i, (output, blocks) in enumerate(zip(sizes, (3, 4, 6, 3), strict=True)):
    for j in range(blocks):
      stride = 2 if i and not j else 1
      yield Block(inputs, output, stride, rngs)
      inputs = output
  yield Head(inputs, classes, rngs=rngs)


def _scaled(sizes: tuple[int, ...], width: float) -> tuple[int, ...]:
  return tuple(max(1, round(n * width)) for n in sizes)


NETWORKS: dict[str, Callable[..., Iterator[nnx.Module]]] = {
  "alexnet": _alexnet,
  "vgg_a": _vgg_a,
  "resnet34": _resnet34,
}
"""What makes the stages of a network, by its name in a configuration."""


def build(
  network: str,
  *,
  size: int,
  channels: int,
  classes: int,
  width: float,
  seed: int,
) -> list[nnx.Module]:
  """The stages of a network, from images to logits.

  Args:
    network: `alexnet`, `vgg_a` or `resnet34`.
    size: height and width of the images: a multiple of 32.
    channels: of the images.
    classes: how many labels there are.
    width: what all channels and widths are multiplied by.
    seed: of the initial parameters.

  Raises:
    ValueError: if an argument is not as said.
  """
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
  make = NETWORKS[network]
  return list(make(size, channels, classes, width, nnx.Rngs(seed)))
