"""GoogLeNet, as its paper has it or as torchvision does."""

from experiments.models.classic import LARGE, LayerGroups, stack_groups
from experiments.models.layers import MEAN, Chain, Conv, Dense, Join, MaxPool
from experiments.models.network import Network, make_classifier, scale_widths
from jaxmotion.core import check_choice

# Channels of the branches: 1x1; 1x1 and 3x3; 1x1 and 5x5; 1x1 after the pool.
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
  *,
  image: int = 224,
  classes: int = 1000,
  width: float = 1.0,
  variant: str = "paper",
) -> Network:
  """Returns GoogLeNet without its auxiliary classifiers.

  Args:
    image: height and width of the images.
    classes: number of labels.
    width: factor of all channels.
    variant: "paper", or "torchvision": batch norm, 3x3 in place of 5x5 and a
      last pooling over windows of 2.
  """
  check_choice("variant", variant, ("paper", "torchvision"))
  norm = variant == "torchvision"
  last_pool = MaxPool("pool4e", 2 if norm else 3, ceil=True)
  a, b = scale_widths((64, 192), width)
  size, stride = (7, 2) if image >= LARGE else (3, 1)
  stem = Conv("conv1", a, size, stride, norm=norm)
  groups: LayerGroups = {
    "conv1": (stem, MaxPool("pool1", 3, ceil=True)),
    "conv2": (Conv("conv2", a, 1, norm=norm),),
    "conv3": (Conv("conv3", b, norm=norm), MaxPool("pool3", 3, ceil=True)),
  }
  for name, widths in _INCEPTIONS.items():
    block = _inception_block(scale_widths(widths, width), norm)
    groups[f"inception{name}"] = (block,)
  groups["inception3b"] += (MaxPool("pool3b", 3, ceil=True),)
  groups["inception4e"] += (last_pool,)
  groups["logits"] = (MEAN, Dense("dense", classes, relu=False))
  return make_classifier("googlenet", stack_groups(groups), image)


def _inception_block(widths: tuple[int, ...], norm: bool) -> Join:
  one, few3, three, few5, five, pooled = widths

  def conv(name: str, features: int, size: int = 1) -> Conv:
    return Conv(name, features, size, norm=norm)

  branches = (
    conv("1x1", one),
    Chain("to3", (conv("3x3_few", few3), conv("3x3", three, 3))),
    Chain("to5", (conv("5x5_few", few5), conv("5x5", five, 3 if norm else 5))),
    Chain(
      "pooled", (MaxPool("pool", 3, 1, padding=1), conv("pool_1x1", pooled))
    ),
  )
  return Join("inception", branches)
