"""Bottleneck ResNets of any depth: in a stage all but the first repeat."""

from collections.abc import Sequence

from experiments.models.classic import LARGE, classifier, scaled
from experiments.models.layers import MEAN, Add, Chain, Conv, Dense, MaxPool
from experiments.models.network import Network, Stage
from jaxmotion.core import check_int

DEPTHS = {
  50: (3, 4, 6, 3),
  101: (3, 4, 23, 3),
  152: (3, 8, 36, 3),
  1001: (3, 57, 270, 3),
  1517: (3, 83, 416, 3),
  2504: (3, 138, 690, 3),
}
"""Blocks of each stage, by the number of layers."""


def depth(blocks: Sequence[int]) -> int:
  """Layers with kernels on the longest way: three a block and two more.

  >>> depth((3, 138, 690, 3))
  2504
  """
  return 3 * sum(blocks) + 2


def resnet(
  blocks: Sequence[int],
  *,
  image: int = 224,
  classes: int = 1000,
  width: float = 1.0,
) -> Network:
  """A bottleneck ResNet, the stride in the convolution of 3 x 3.

  Args:
    blocks: of each of the four stages.
    image: height and width of the images.
    classes: how many labels there are.
    width: what all channels are multiplied by.

  Raises:
    ValueError: not four positive numbers of blocks.
  """
  blocks = tuple(blocks)
  if len(blocks) != 4:
    raise ValueError(f"`blocks` must be four numbers, got {blocks!r}.")
  for i, count in enumerate(blocks):
    check_int(f"blocks[{i}]", count, 1)
  widths = scaled((64, 128, 256, 512), width)
  stages = [Stage("stem", _stem(widths[0], image))]
  for i, (few, count) in enumerate(zip(widths, blocks, strict=True)):
    stride = 2 if i else 1
    around = Conv("shortcut", 4 * few, 1, stride, norm=True, relu=False)
    first = Add("add", _bottleneck(few, stride), around)
    stages.append(Stage(f"stage{i + 1}_first", first))
    if count > 1:
      block = Add("add", _bottleneck(few, 1))
      stages.append(Stage(f"stage{i + 1}_rest", block, count - 1))
  head = Chain("logits", (MEAN, Dense("dense", classes, relu=False)))
  stages.append(Stage("logits", head))
  return classifier(f"resnet{depth(blocks)}", stages, image)


def _stem(features: int, image: int) -> Conv | Chain:
  if image < LARGE:
    return Conv("conv", features, norm=True)
  conv = Conv("conv", features, 7, stride=2, norm=True)
  return Chain("stem", (conv, MaxPool("pool", 3, padding=1)))


def _bottleneck(few: int, stride: int) -> Chain:
  layers = (
    Conv("a", few, 1, norm=True),
    Conv("b", few, 3, stride, norm=True),
    Conv("c", 4 * few, 1, norm=True, relu=False),
  )
  return Chain("body", layers)
