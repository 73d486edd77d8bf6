"""Inception-v4, in whose stages equal blocks repeat, and GoogLeNet."""

from experiments.models import classic, layers, network
from experiments.models.layers import (
  MEAN,
  Chain,
  Conv,
  Dense,
  Join,
  Layer,
  MaxPool,
  MeanPool,
)
from jaxmotion import core


def inception_v4(
  *, image: int = 299, classes: int = 1000, width: float = 1.0
) -> network.Network:
  """Returns Inception-v4 (arXiv:1602.07261), without dropout."""
  # For images of fewer than `LARGE` pixels, layers pad the image where the
  # paper's do not, and the first convolution has no stride.
  make = _BlockMaker(width, small=image < classic.LARGE)
  stages = [
    network.Stage("stem", make.stem()),
    network.Stage("a", make.block_a(), 4),
    network.Stage("reduce_a", make.reduce_a()),
    network.Stage("b", make.block_b(), 7),
    network.Stage("reduce_b", make.reduce_b()),
    network.Stage("c", make.block_c(), 3),
  ]
  head = Chain("logits", (MEAN, Dense("dense", classes, relu=False)))
  return network.make_classifier(
    "inception_v4", [*stages, network.Stage("logits", head)], image
  )


class _BlockMaker:
  """Makes blocks at a width; layers that halve a small image pad it first."""

  def __init__(self, width: float, small: bool):
    self._width = width
    self._small = small

  def stem(self) -> Chain:
    """Shrinks the image to an eighth, by two joins of a pool and a conv."""
    cut = None if self._small else 0
    first = 1 if self._small else 2
    branches = (
      self._make_chain("few", (64, 1), (96, 3)),
      self._make_chain("tall", (64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3)),
    )
    layers = (
      self._make_conv("conv1", 32, 3, first, cut),
      self._make_conv("conv2", 32, 3, 1, cut),
      self._make_conv("conv3", 64, 3),
      Join("half1", (self._half_pool(), self._half_conv("conv4", 96))),
      Join("mixed", branches),
      Join("half2", (self._half_conv("conv5", 192), self._half_pool())),
    )
    return Chain("stem", layers)

  def block_a(self) -> Join:
    return self._mean_block(
      ((96, 1),), ((96, 1),), ((64, 1), (96, 3)), ((64, 1), (96, 3), (96, 3))
    )

  def block_b(self) -> Join:
    return self._mean_block(
      ((128, 1),),
      ((384, 1),),
      ((192, 1), (224, (1, 7)), (256, (7, 1))),
      ((192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))),
    )

  def block_c(self) -> Join:
    few = (self._make_conv("few_0", 384, 1), self._fork_convs("few"))
    many = self._make_chain("many_in", (384, 1), (448, (3, 1)), (512, (1, 3)))
    branches = (
      Chain("pooled", (MeanPool("pool"), self._make_conv("pool_1", 256, 1))),
      self._make_conv("one", 256, 1),
      Chain("few", few),
      Chain("many", (many, self._fork_convs("many"))),
    )
    return Join("block", branches)

  def reduce_a(self) -> Join:
    few = self._make_chain("few", (192, 1), (224, 3))
    branches = (
      self._half_pool(),
      self._half_conv("conv", 384),
      Chain("deep", (few, self._half_conv("deep", 256))),
    )
    return Join("block", branches)

  def reduce_b(self) -> Join:
    few = self._make_chain("few", (192, 1))
    many = self._make_chain("many", (256, 1), (256, (1, 7)), (320, (7, 1)))
    branches = (
      self._half_pool(),
      Chain("narrow", (few, self._half_conv("narrow", 192))),
      Chain("wide", (many, self._half_conv("wide", 320))),
    )
    return Join("block", branches)

  def _mean_block(self, pooled: "_Convs", *others: "_Convs") -> Join:
    mean = Chain(
      "pooled", (MeanPool("pool"), self._make_chain("pool", *pooled))
    )
    chains = [self._make_chain(f"way{i}", *c) for i, c in enumerate(others)]
    return Join("block", (mean, *chains))

  def _fork_convs(self, name: str) -> Join:
    wide = self._make_conv(f"{name}_wide", 256, (1, 3))
    tall = self._make_conv(f"{name}_tall", 256, (3, 1))
    return Join(f"{name}_fork", (wide, tall))

  def _make_chain(self, name: str, *convs: tuple[int, "_Size"]) -> Chain:
    layers: list[Layer] = []
    for i, (features, size) in enumerate(convs):
      layers.append(self._make_conv(f"{name}_{i}", features, size))
    return Chain(name, tuple(layers))

  def _half_conv(self, name: str, features: int) -> Conv:
    return self._make_conv(f"{name}_half", features, 3, 2, self._padding)

  def _half_pool(self) -> MaxPool:
    return MaxPool("pool", 3, padding=self._padding)

  @property
  def _padding(self) -> int:
    return int(self._small)

  def _make_conv(
    self,
    name: str,
    features: int,
    size: "_Size",
    stride: int = 1,
    padding: int | None = None,
  ) -> Conv:
    (features,) = network.scale_widths((features,), self._width)
    return Conv(name, features, size, stride, padding, norm=True)


_Size = int | tuple[int, int]
_Convs = tuple[tuple[int, _Size], ...]


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


@core.declare(variant=core.choice(("paper", "torchvision")))
def googlenet(
  *,
  image: int = 224,
  classes: int = 1000,
  width: float = 1.0,
  variant: str = "paper",
) -> network.Network:
  """Returns GoogLeNet without its auxiliary classifiers."""
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
  """Joins four branches: 1x1, two deeper ones, and a pool."""
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
