"""Networks of convolutions, biases and ReLUs, without batch norm or dropout.

At 224 pixels they have the shapes of their papers, or of torchvision where it
differs from them (AlexNet). Below `LARGE` pixels the first convolution has a
smaller kernel and no stride, so that a small image is not gone too soon.
"""

import math

import jax

from experiments.models.layers import (
  MEAN,
  Chain,
  Conv,
  Dense,
  Join,
  Layer,
  MaxPool,
)
from experiments.models.network import Network, Stage
from jaxmotion.core import check_int

LARGE = 128
"""Pixels from which on the first layers are those of the papers."""

_Groups = dict[str, tuple[Layer, ...]]


def alexnet(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> Network:
  """AlexNet of one column, without local response normalisation."""
  a, b, c, d, wide = scaled((64, 192, 384, 256, 4096), width)
  if image >= LARGE:
    first = Conv("conv1", a, 11, stride=4, padding=2)
  else:
    first = Conv("conv1", a, 5)
  groups: _Groups = {
    "conv1": (first, MaxPool("pool1", 3)),
    "conv2": (Conv("conv2", b, 5), MaxPool("pool2", 3)),
    "conv3": (Conv("conv3", c),),
    "conv4": (Conv("conv4", d),),
    "conv5": (Conv("conv5", d), MaxPool("pool5", 3)),
  }
  return classifier(
    "alexnet", [*_stages(groups), *_dense(wide, classes)], image
  )


def vgg16(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> Network:
  """VGG-16 (configuration D)."""
  *widths, wide = scaled((64, 128, 256, 512, 512, 4096), width)
  groups: _Groups = {}
  depths = (2, 2, 3, 3, 3)
  for i, (features, depth) in enumerate(zip(widths, depths, strict=True), 1):
    for j in range(1, depth + 1):
      name = f"conv{i}_{j}"
      groups[name] = (Conv(name, features),)
    groups[name] += (MaxPool(f"pool{i}", 2),)
  return classifier("vgg16", [*_stages(groups), *_dense(wide, classes)], image)


def nin(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> Network:
  """Network in network: two layers of 1 x 1 after every convolution."""
  a, b, c, d = scaled((96, 256, 384, 1024), width)
  if image >= LARGE:
    first = Conv("conv1", a, 11, stride=4, padding=0)
  else:
    first = Conv("conv1", a, 5)
  convs = (first, Conv("conv2", b, 5), Conv("conv3", c), Conv("conv4", d))
  groups: _Groups = {}
  for i, conv in enumerate(convs, 1):
    groups[f"conv{i}"] = (conv,)
    groups[f"mix{i}a"] = (Conv(f"mix{i}a", conv.features, 1),)
    if i < len(convs):
      mix = Conv(f"mix{i}b", conv.features, 1)
      groups[f"mix{i}b"] = (mix, MaxPool(f"pool{i}", 3, ceil=True))
  # Logits of either sign: the paper's last ReLU is left out.
  groups["mix4b"] = (Conv("mix4b", classes, 1, relu=False), MEAN)
  return classifier("nin", _stages(groups), image)


def squeezenet(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> Network:
  """SqueezeNet 1.0: "fire" layers of a few channels and then many."""
  (first,) = scaled((96,), width)
  if image >= LARGE:
    conv = Conv("conv1", first, 7, stride=2, padding=0)
  else:
    conv = Conv("conv1", first)
  groups: _Groups = {"conv1": (conv, MaxPool("pool1", 3, ceil=True))}
  fires = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192))
  for i, fire in enumerate((*fires, (64, 256), (64, 256)), 2):
    groups[f"fire{i}"] = _fire(*scaled(fire, width))
    if i in (4, 8):
      groups[f"fire{i}"] += (MaxPool(f"pool{i}", 3, ceil=True),)
  groups["conv10"] = (Conv("conv10", classes, 1, relu=False), MEAN)
  return classifier("squeezenet", _stages(groups), image)


def _fire(few: int, many: int) -> tuple[Layer, ...]:
  branches = (Conv("expand1", many, 1), Conv("expand3", many, 3))
  return Conv("squeeze", few, 1), Join("expand", branches)


# Widths of the branches: 1x1; 1x1 and 3x3; 1x1 and 5x5; 1x1 after the pool.
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


def googlenet(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> Network:
  """GoogLeNet of the paper, without its auxiliary classifiers."""
  a, b = scaled((64, 192), width)
  stem = Conv("conv1", a, 7, stride=2) if image >= LARGE else Conv("conv1", a)
  groups: _Groups = {
    "conv1": (stem, MaxPool("pool1", 3, ceil=True)),
    "conv2": (Conv("conv2", a, 1),),
    "conv3": (Conv("conv3", b), MaxPool("pool3", 3, ceil=True)),
  }
  for name, widths in _INCEPTIONS.items():
    stage = f"inception{name}"
    groups[stage] = (_inception(*scaled(widths, width)),)
    if name in ("3b", "4e"):
      groups[stage] += (MaxPool(f"pool{name}", 3, ceil=True),)
  groups["logits"] = (MEAN, Dense("dense", classes, relu=False))
  return classifier("googlenet", _stages(groups), image)


def _inception(
  one: int, few3: int, three: int, few5: int, five: int, pooled: int
) -> Join:
  branches = (
    Conv("1x1", one, 1),
    Chain("to3", (Conv("3x3_few", few3, 1), Conv("3x3", three, 3))),
    Chain("to5", (Conv("5x5_few", few5, 1), Conv("5x5", five, 5))),
    Chain(
      "pooled",
      (MaxPool("pool", 3, 1, padding=1), Conv("pool_1x1", pooled, 1)),
    ),
  )
  return Join("inception", branches)


def classifier(name: str, stages: list[Stage], image: int) -> Network:
  """A network of square colour images.

  Raises:
    ValueError: fewer than 32 pixels, which not all networks can halve.
  """
  check_int("image", image, 32)
  pixels = jax.ShapeDtypeStruct((image, image, 3), "float32")
  label = jax.ShapeDtypeStruct((), "int32")
  return Network(name, tuple(stages), pixels, label)


def scaled(sizes: tuple[int, ...], width: float) -> tuple[int, ...]:
  """Sizes at a width.

  Raises:
    ValueError: the width is not positive.
  """
  if not 0 < width < math.inf:
    raise ValueError(f"`width` must be a positive number, got {width!r}.")
  return tuple(max(1, round(n * width)) for n in sizes)


def _stages(groups: _Groups) -> list[Stage]:
  return [Stage(name, Chain(name, group)) for name, group in groups.items()]


def _dense(wide: int, classes: int) -> list[Stage]:
  layers = (
    Dense("fc1", wide),
    Dense("fc2", wide),
    Dense("fc3", classes, relu=False),
  )
  return [Stage(layer.name, layer) for layer in layers]
