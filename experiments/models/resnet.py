"""ResNets of any depth: in each stage all blocks but the first repeat."""

from collections.abc import Sequence

from experiments.models import classic, network
from experiments.models.layers import MEAN, Add, Chain, Conv, Dense, MaxPool
from jaxmotion import core

DEPTHS = {
  18: (2, 2, 2, 2),
  34: (3, 4, 6, 3),
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  1001: (3, 57, 270, 3),
  1517: (3, 83, 416, 3),
  2504: (3, 138, 690, 3),
}
"""Blocks of each stage, by the number of layers: bottlenecks from 50 on."""

# Layers with kernels in a block, and its output channels per inner channel.
_BLOCKS = {"basic": (2, 1), "bottleneck": (3, 4)}


def block_kind(layers: int) -> str:
  """Returns the kind of block of a depth of `DEPTHS`."""
  return "basic" if layers < 50 else "bottleneck"


def count_layers(blocks: Sequence[int], block: str = "bottleneck") -> int:
  """Returns the number of layers with kernels, without those of shortcuts.

  >>> count_layers((3, 138, 690, 3)), count_layers((3, 4, 6, 3), "basic")
  (2504, 34)
  """
  return _BLOCKS[block][0] * sum(blocks) + 2


@core.declare(block=core.choice(_BLOCKS))
def resnet(
  blocks: Sequence[int],
  *,
  image: int = 224,
  classes: int = 1000,
  width: float = 1.0,
  block: str = "bottleneck",
) -> network.Network:
  """Returns a ResNet whose strides are in convolutions of 3 x 3."""
  blocks = tuple(blocks)
  if len(blocks) != 4:
    raise ValueError(f"`blocks` must be four numbers, got {blocks!r}.")
  for i, count in enumerate(blocks):
    core.integer(1)(f"blocks[{i}]", count)
  widths = network.scale_widths((64, 128, 256, 512), width)
  inputs = widths[0]
  stages = [network.Stage("stem", _stem(inputs, image))]
  for i, (few, count) in enumerate(zip(widths, blocks, strict=True)):
    stride, outputs = 2 if i else 1, _BLOCKS[block][1] * few
    shortcut = None
    if stride > 1 or inputs != outputs:
      shortcut = Conv("shortcut", outputs, 1, stride, norm=True, relu=False)
    first = Add("add", _block_body(block, few, stride), shortcut)
    stages.append(network.Stage(f"stage{i + 1}_first", first))
    if count > 1:
      other = Add("add", _block_body(block, few, 1))
      stages.append(network.Stage(f"stage{i + 1}_rest", other, count - 1))
    inputs = outputs
  head = Chain("logits", (MEAN, Dense("dense", classes, relu=False)))
  stages.append(network.Stage("logits", head))
  name = f"resnet{count_layers(blocks, block)}"
  return network.make_classifier(name, stages, image)


def _stem(features: int, image: int) -> Conv | Chain:
  if image < classic.LARGE:
    return Conv("conv", features, norm=True)
  conv = Conv("conv", features, 7, stride=2, norm=True)
  return Chain("stem", (conv, MaxPool("pool", 3, padding=1)))


def _block_body(block: str, few: int, stride: int) -> Chain:
  """Returns the convolutions of a block, without its shortcut."""
  layers: tuple[Conv, ...]
  if block == "basic":
    layers = (
      Conv("a", few, 3, stride, norm=True),
      Conv("b", few, 3, norm=True, relu=False),
    )
  else:
    layers = (
      Conv("a", few, 1, norm=True),
      Conv("b", few, 3, stride, norm=True),
      Conv("c", 4 * few, 1, norm=True, relu=False),
    )
  return Chain("body", layers)
