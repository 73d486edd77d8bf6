"""Networks of convolutions, biases and ReLUs: AlexNet, VGG, NiN, SqueezeNet.

At 224 pixels they have the shapes of their papers, or of torchvision where
that differs (AlexNet). Below `LARGE` pixels the first convolution has a
smaller kernel and no stride, so that a small image does not shrink too soon.
There is no dropout.
"""

from experiments.models import network
from experiments.models.layers import (
  MEAN,
  Chain,
  Conv,
  Dense,
  Join,
  Layer,
  MaxPool,
)

LARGE = 128
"""Pixels from which on the first layers are those of the papers."""

VGG_DEPTHS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3)}
"""Convolutions between poolings, by the number of layers with kernels."""

LayerGroups = dict[str, tuple[Layer, ...]]


def alexnet(
  *,
  image: int = 224,
  classes: int = 1000,
  width: float = 1.0,
  channels: tuple[int, ...] = (64, 192, 384, 256, 256),
  hidden: int = 2,
  stem: tuple[int, int, int] | None = None,
) -> network.Network:
  """Returns AlexNet of one column, without local response normalization."""
  *widths, wide = network.scale_widths((*channels, 4096), width)
  if stem is None:
    stem = (11, 4, 2) if image >= LARGE else (5, 1, 2)
  a, b, c, d, e = widths
  groups: LayerGroups = {
    "conv1": (Conv("conv1", a, *stem), MaxPool("pool1", 3)),
    "conv2": (Conv("conv2", b, 5), MaxPool("pool2", 3)),
    "conv3": (Conv("conv3", c),),
    "conv4": (Conv("conv4", d),),
    "conv5": (Conv("conv5", e), MaxPool("pool5", 3)),
  }
  stages = [*stack_groups(groups), *_dense_stages(wide, hidden, classes)]
  return network.make_classifier("alexnet", stages, image)


def vgg(
  depth: int = 16, *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> network.Network:
  """Returns VGG without batch norm: 11 is configuration A, 16 is D."""
  *widths, wide = network.scale_widths((64, 128, 256, 512, 512, 4096), width)
  groups: LayerGroups = {}
  counts = VGG_DEPTHS[depth]
  for i, (features, count) in enumerate(zip(widths, counts, strict=True), 1):
    for j in range(1, count + 1):
      name = f"conv{i}_{j}"
      groups[name] = (Conv(name, features),)
    groups[name] += (MaxPool(f"pool{i}", 2),)
  stages = [*stack_groups(groups), *_dense_stages(wide, 2, classes)]
  return network.make_classifier(f"vgg{depth}", stages, image)


def nin(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> network.Network:
  """Returns network in network: two 1 x 1 layers after every convolution."""
  a, b, c, d = network.scale_widths((96, 256, 384, 1024), width)
  if image >= LARGE:
    first = Conv("conv1", a, 11, stride=4, padding=0)
  else:
    first = Conv("conv1", a, 5)
  convs = (first, Conv("conv2", b, 5), Conv("conv3", c), Conv("conv4", d))
  groups: LayerGroups = {}
  for i, conv in enumerate(convs, 1):
    groups[f"conv{i}"] = (conv,)
    groups[f"mix{i}a"] = (Conv(f"mix{i}a", conv.features, 1),)
    if i < len(convs):
      mix = Conv(f"mix{i}b", conv.features, 1)
      groups[f"mix{i}b"] = (mix, MaxPool(f"pool{i}", 3, ceil=True))
  # The paper's last ReLU is left out: logits have either sign.
  groups["mix4b"] = (Conv("mix4b", classes, 1, relu=False), MEAN)
  return network.make_classifier("nin", stack_groups(groups), image)


def squeezenet(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> network.Network:
  """Returns SqueezeNet 1.0: fire layers, which squeeze and then expand."""
  (first,) = network.scale_widths((96,), width)
  if image >= LARGE:
    conv = Conv("conv1", first, 7, stride=2, padding=0)
  else:
    conv = Conv("conv1", first)
  groups: LayerGroups = {"conv1": (conv, MaxPool("pool1", 3, ceil=True))}
  fires = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192))
  for i, fire in enumerate((*fires, (64, 256), (64, 256)), 2):
    groups[f"fire{i}"] = _fire_layers(*network.scale_widths(fire, width))
    if i in (4, 8):
      groups[f"fire{i}"] += (MaxPool(f"pool{i}", 3, ceil=True),)
  groups["conv10"] = (Conv("conv10", classes, 1, relu=False), MEAN)
  return network.make_classifier("squeezenet", stack_groups(groups), image)


def stack_groups(groups: LayerGroups) -> list[network.Stage]:
  """Returns one stage for each group of layers."""
  return [
    network.Stage(name, Chain(name, group)) for name, group in groups.items()
  ]


def _fire_layers(few: int, many: int) -> tuple[Layer, ...]:
  branches = (Conv("expand1", many, 1), Conv("expand3", many, 3))
  return Conv("squeeze", few, 1), Join("expand", branches)


def _dense_stages(wide: int, hidden: int, classes: int) -> list[network.Stage]:
  layers = [Dense(f"fc{i}", wide) for i in range(1, hidden + 1)]
  layers.append(Dense(f"fc{hidden + 1}", classes, relu=False))
  return [network.Stage(layer.name, layer) for layer in layers]
