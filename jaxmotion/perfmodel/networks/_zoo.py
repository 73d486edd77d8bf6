"""Networks of the performance model's literature, with abstract parameters.

They are the variants that torchvision has, so that their numbers of parameters
and operations can be compared with published ones: AlexNet of one column, VGG
without batch norm, GoogLeNet with batch norm, 3x3 in place of 5x5 and without
auxiliary heads. Dropout is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmotion.core import ShapedLike, check_choice
from jaxmotion.perfmodel.networks._network import (
  IMAGES,
  LABELS,
  AddRelu,
  AveragePool,
  Convolution,
  CrossEntropy,
  Dense,
  Join,
  Layer,
  Network,
  Pool,
)


def reference_network(name: str) -> Network:
  """Returns a network for 224 x 224 images of 1000 classes.

  Args:
    name: "alexnet", "vgg11", "vgg16", "resnet18", "resnet34", "resnet50" or
      "googlenet".

  Raises:
    ValueError: another name.

  Example:
    >>> reference_network("resnet50").size
    25557032

  References:
    Krizhevsky, One weird trick for parallelizing convolutional neural
    networks, 2014. Simonyan and Zisserman, Very deep convolutional networks
    for large-scale image recognition, 2015. He et al., Deep residual learning
    for image recognition, 2016. Szegedy et al., Going deeper with
    convolutions, 2015. Numbers: https://docs.pytorch.org/vision/stable/models
  """
  makers: dict[str, Callable[[_Builder], int]] = {
    "alexnet": _alexnet,
    "vgg11": lambda b: _vgg(b, (1, 1, 2, 2, 2)),
    "vgg16": lambda b: _vgg(b, (2, 2, 3, 3, 3)),
    "resnet18": lambda b: _resnet(b, (2, 2, 2, 2), _basic),
    "resnet34": lambda b: _resnet(b, (3, 4, 6, 3), _basic),
    "resnet50": lambda b: _resnet(b, (3, 4, 6, 3), _bottleneck),
    "googlenet": _googlenet,
  }
  check_choice("name", name, makers)
  builder = _Builder((224, 224, 3))
  logits = makers[name](builder)
  builder.add("loss", CrossEntropy(), {}, (logits, LABELS), mixes=True)
  return Network(name, tuple(builder.layers), builder.image)


class _Builder:
  """Adds layers and knows the shapes of their outputs."""

  def __init__(self, image: tuple[int, ...]):
    self.image = image
    self.layers: list[Layer] = []
    self._shapes: dict[int, ShapedLike] = {
      IMAGES: _array(1, *image),
      LABELS: jax.ShapeDtypeStruct((1,), "int32"),
    }

  def add(
    self,
    name: str,
    fn: Callable[..., Any],
    params: dict[str, ShapedLike],
    inputs: Sequence[int],
    *,
    mixes: bool = False,
  ) -> int:
    likes = [self._shapes[i] for i in inputs]
    place = len(self.layers)
    self._shapes[place] = jax.eval_shape(fn, params, *likes)
    self.layers.append(Layer(name, fn, params, tuple(inputs), mixes))
    return place

  def channels(self, x: int) -> int:
    return int(self._shapes[x].shape[-1])

  def conv(
    self,
    name: str,
    x: int,
    out: int,
    size: int,
    stride: int = 1,
    padding: int | None = None,
    *,
    norm: bool = True,
    relu: bool = True,
  ) -> int:
    params = {
      "kernel": _array(size, size, self.channels(x), out),
      "bias": _array(out),
    }
    if norm:
      params["scale"] = params["bias"]
    pad = size // 2 if padding is None else padding
    fn = Convolution(stride, pad, relu)
    return self.add(name, fn, params, (x,), mixes=True)

  def dense(self, name: str, x: int, out: int, *, relu: bool = False) -> int:
    params = {
      "kernel": _array(math.prod(self._shapes[x].shape[1:]), out),
      "bias": _array(out),
    }
    return self.add(name, Dense(relu), params, (x,), mixes=True)

  def pool(
    self,
    name: str,
    x: int,
    window: int,
    stride: int,
    padding: tuple[int, int] = (0, 0),
  ) -> int:
    return self.add(name, Pool(window, stride, padding), {}, (x,))


def _array(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, "float32")


def _alexnet(b: _Builder) -> int:
  x = b.conv("conv1", IMAGES, 64, 11, 4, 2, norm=False)
  x = b.pool("pool1", x, 3, 2)
  x = b.conv("conv2", x, 192, 5, norm=False)
  x = b.pool("pool2", x, 3, 2)
  for i, width in enumerate((384, 256, 256)):
    x = b.conv(f"conv{3 + i}", x, width, 3, norm=False)
  x = b.pool("pool5", x, 3, 2)
  return _head(b, x)


def _vgg(b: _Builder, stages: Sequence[int]) -> int:
  x = IMAGES
  for i, (depth, width) in enumerate(
    zip(stages, (64, 128, 256, 512, 512), strict=True)
  ):
    for j in range(depth):
      x = b.conv(f"conv{i + 1}_{j + 1}", x, width, 3, norm=False)
    x = b.pool(f"pool{i + 1}", x, 2, 2)
  return _head(b, x)


def _head(b: _Builder, x: int) -> int:
  x = b.dense("fc1", x, 4096, relu=True)
  x = b.dense("fc2", x, 4096, relu=True)
  return b.dense("fc3", x, 1000)


_Block = Callable[[_Builder, str, int, int, int], int]


def _resnet(b: _Builder, stages: Sequence[int], block: _Block) -> int:
  x = b.conv("conv1", IMAGES, 64, 7, 2)
  x = b.pool("pool1", x, 3, 2, (1, 1))
  for i, depth in enumerate(stages):
    for j in range(depth):
      stride = 2 if i and not j else 1
      x = block(b, f"stage{i + 1}_{j + 1}", x, 64 << i, stride)
  return b.dense("fc", b.add("average", AveragePool(), {}, (x,)), 1000)


def _basic(b: _Builder, name: str, x: int, width: int, stride: int) -> int:
  y = b.conv(f"{name}_a", x, width, 3, stride)
  y = b.conv(f"{name}_b", y, width, 3, relu=False)
  return _residual(b, name, x, y, stride)


def _bottleneck(b: _Builder, name: str, x: int, width: int, stride: int) -> int:
  y = b.conv(f"{name}_a", x, width, 1)
  y = b.conv(f"{name}_b", y, width, 3, stride)
  y = b.conv(f"{name}_c", y, 4 * width, 1, relu=False)
  return _residual(b, name, x, y, stride)


def _residual(b: _Builder, name: str, x: int, y: int, stride: int) -> int:
  width = b.channels(y)
  if stride > 1 or b.channels(x) != width:
    x = b.conv(f"{name}_skip", x, width, 1, stride, relu=False)
  return b.add(f"{name}_add", AddRelu(), {}, (x, y))


# Widths of the branches: 1x1; 1x1 and 3x3; 1x1 and 3x3; 1x1 after the pool.
_INCEPTIONS = {
  "3a": (64, 96, 128, 16, 32, 32),
  "3b": (128, 128, 192, 32, 96, 64),
  "4a": (192, 96, 208, 16, 48, 64),
  "4b": (160, 112, 224, 24, 64, 64),
  "4c": (128, 128, 256, 24, 64, 64),
  "4d": (112, 144, 288, 32, 64, 64),
  "4e": (256, 160, 320, 32, 128, 128),
  "5a": (256, 160, 320, 32, 128, 128),
  "5b": (384, 192, 384, 48, 128, 128),
}


def _googlenet(b: _Builder) -> int:
  x = b.conv("conv1", IMAGES, 64, 7, 2)
  x = b.pool("pool1", x, 3, 2, (0, 1))
  x = b.conv("conv2", x, 64, 1)
  x = b.conv("conv3", x, 192, 3)
  x = b.pool("pool3", x, 3, 2, (0, 1))
  for name, widths in _INCEPTIONS.items():
    if name == "4a":
      x = b.pool("pool4", x, 3, 2, (0, 1))
    elif name == "5a":
      x = b.pool("pool5", x, 2, 2)
    x = _inception(b, f"inception{name}", x, widths)
  return b.dense("fc", b.add("average", AveragePool(), {}, (x,)), 1000)


def _inception(b: _Builder, name: str, x: int, widths: Sequence[int]) -> int:
  one, before3, three, before5, five, pooled = widths
  y1 = b.conv(f"{name}_1", x, one, 1)
  y2 = b.conv(f"{name}_2a", x, before3, 1)
  y2 = b.conv(f"{name}_2b", y2, three, 3)
  y3 = b.conv(f"{name}_3a", x, before5, 1)
  y3 = b.conv(f"{name}_3b", y3, five, 3)
  y4 = b.pool(f"{name}_4a", x, 3, 1, (1, 1))
  y4 = b.conv(f"{name}_4b", y4, pooled, 1)
  return b.add(name, Join(), {}, (y1, y2, y3, y4))
