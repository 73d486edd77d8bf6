"""Networks of convolutions, biases and ReLUs: AlexNet, VGG, NiN, SqueezeNet.

At 224 pixels they have the shapes of their papers, or of torchvision where
that differs (AlexNet). Below `LARGE` pixels the first convolution has a
smaller kernel and no stride, so that a small image does not shrink too soon.
There is no dropout.
"""

from experiments.models.layers import (
  MEAN,
  Chain,
  Conv,
  Dense,
  Join,
  Layer,
  MaxPool,
)
from experiments.models.network import (
  Network,
  Stage,
  make_classifier,
  scale_widths,
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
) -> Network:
  """Returns AlexNet of one column, without local response normalization.

  Args:
    image: height and width of the images.
    classes: number of labels.
    width: factor of all channels.
    channels: outputs of the five convolutions; the default is torchvision's.
    hidden: number of fully connected layers of 4096 before the logits.
    stem: kernel size, stride and padding of the first convolution. None is
      (11, 4, 2), and (5, 1, 2) below `LARGE` pixels.
  """
  *widths, wide = scale_widths((*channels, 4096), width)
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
  return make_classifier("alexnet", stages, image)


def vgg(
  depth: int = 16,
  *,
  image: int = 224,
  classes: int = 1000,
  width: float = 1.0,
) -> Network:
  """Returns VGG without batch norm: 11 is configuration A, 16 is D.

  Args:
    depth: a key of `VGG_DEPTHS`.
    image: height and width of the images.
    classes: number of labels.
    width: factor of all channels.
  """
  *widths, wide = scale_widths((64, 128, 256, 512, 512, 4096), width)
  groups: LayerGroups = {}
  counts = VGG_DEPTHS[depth]
  for i, (features, count) in enumerate(zip(widths, counts, strict=True), 1):
    for j in range(1, count + 1):
      name = f"conv{i}_{j}"
      groups[name] = (Conv(name, features),)
    groups[name] += (MaxPool(f"pool{i}", 2),)
  stages = [*stack_groups(groups), *_dense_stages(wide, 2, classes)]
  return make_classifier(f"vgg{depth}", stages, image)


def nin(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> Network:
  """Returns network in network: two 1 x 1 layers after every convolution."""
  a, b, c, d = scale_widths((96, 256, 384, 1024), width)
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
  return make_classifier("nin", stack_groups(groups), image)


def squeezenet(
  *, image: int = 224, classes: int = 1000, width: float = 1.0
) -> Network:
  """Returns SqueezeNet 1.0: fire layers, which squeeze and then expand."""
  (first,) = scale_widths((96,), width)
  if image >= LARGE:
    conv = Conv("conv1", first, 7, stride=2, padding=0)
  else:
    conv = Conv("conv1", first)
  groups: LayerGroups = {"conv1": (conv, MaxPool("pool1", 3, ceil=True))}
  fires = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192))
  for i, fire in enumerate((*fires, (64, 256), (64, 256)), 2):
    groups[f"fire{i}"] = _fire_layers(*scale_widths(fire, width))
    if i in (4, 8):
      groups[f"fire{i}"] += (MaxPool(f"pool{i}", 3, ceil=True),)
  groups["conv10"] = (Conv("conv10", classes, 1, relu=False), MEAN)
  return make_classifier("squeezenet", stack_groups(groups), image)


def stack_groups(groups: LayerGroups) -> list[Stage]:
  """Returns one stage for each group of layers."""
  return [Stage(name, Chain(name, group)) for name, group in groups.items()]


def _fire_layers(few: int, many: int) -> tuple[Layer, ...]:
  branches = (Conv("expand1", many, 1), Conv("expand3", many, 3))
  return Conv("squeeze", few, 1), Join("expand", branches)


def _dense_stages(wide: int, hidden: int, classes: int) -> list[Stage]:
  layers = [Dense(f"fc{i}", wide) for i in range(1, hidden + 1)]
  layers.append(Dense(f"fc{hidden + 1}", classes, relu=False))
  return [Stage(layer.name, layer) for layer in layers]
