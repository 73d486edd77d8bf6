"""GoogLeNet, as its paper has it or as torchvision does."""

from experiments.models import classic, layers, network
from jaxmotion import core

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
) -> network.Network:
  """Returns GoogLeNet without its auxiliary classifiers."""
  core.check_choice("variant", variant, ("paper", "torchvision"))
  norm = variant == "torchvision"
  last_pool = layers.MaxPool("pool4e", 2 if norm else 3, ceil=True)
  a, b = network.scale_widths((64, 192), width)
  size, stride = (7, 2) if image >= classic.LARGE else (3, 1)
  stem = layers.Conv("conv1", a, size, stride, norm=norm)
  groups: classic.LayerGroups = {
    "conv1": (stem, layers.MaxPool("pool1", 3, ceil=True)),
    "conv2": (layers.Conv("conv2", a, 1, norm=norm),),
    "conv3": (
      layers.Conv("conv3", b, norm=norm),
      layers.MaxPool("pool3", 3, ceil=True),
    ),
  }
  for name, widths in _INCEPTIONS.items():
    block = _inception_block(network.scale_widths(widths, width), norm)
    groups[f"inception{name}"] = (block,)
  groups["inception3b"] += (layers.MaxPool("pool3b", 3, ceil=True),)
  groups["inception4e"] += (last_pool,)
  groups["logits"] = (layers.MEAN, layers.Dense("dense", classes, relu=False))
  return network.make_classifier(
    "googlenet", classic.stack_groups(groups), image
  )


def _inception_block(widths: tuple[int, ...], norm: bool) -> layers.Join:
  one, few3, three, few5, five, pooled = widths

  def conv(name: str, features: int, size: int = 1) -> layers.Conv:
    return layers.Conv(name, features, size, norm=norm)

  branches = (
    conv("1x1", one),
    layers.Chain("to3", (conv("3x3_few", few3), conv("3x3", three, 3))),
    layers.Chain(
      "to5", (conv("5x5_few", few5), conv("5x5", five, 3 if norm else 5))
    ),
    layers.Chain(
      "pooled",
      (layers.MaxPool("pool", 3, 1, padding=1), conv("pool_1x1", pooled)),
    ),
  )
  return layers.Join("inception", branches)
