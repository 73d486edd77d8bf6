"""Inception-v4, whose 4, 7 and 3 equal blocks repeat."""

from experiments.models.classic import LARGE, classifier, scaled
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
from experiments.models.network import Network, Stage


def inception_v4(
  *, image: int = 299, classes: int = 1000, width: float = 1.0
) -> Network:
  """Inception-v4 (arXiv:1602.07261), without dropout.

  Images of fewer than `LARGE` pixels are padded where the paper's are not, and
  the first convolution has no stride.
  """
  make = _Maker(width, small=image < LARGE)
  stages = [
    Stage("stem", make.stem()),
    Stage("a", make.a(), 4),
    Stage("reduce_a", make.reduce_a()),
    Stage("b", make.b(), 7),
    Stage("reduce_b", make.reduce_b()),
    Stage("c", make.c(), 3),
  ]
  head = Chain("logits", (MEAN, Dense("dense", classes, relu=False)))
  return classifier("inception_v4", [*stages, Stage("logits", head)], image)


class _Maker:
  """Blocks at a width; what halves the image pads it if it is small."""

  def __init__(self, width: float, small: bool):
    self._width = width
    self._small = small

  def stem(self) -> Chain:
    cut = None if self._small else 0
    first = 1 if self._small else 2
    branches = (
      self._chain("few", (64, 1), (96, 3)),
      self._chain("tall", (64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3)),
    )
    layers = (
      self._conv("conv1", 32, 3, first, cut),
      self._conv("conv2", 32, 3, 1, cut),
      self._conv("conv3", 64, 3),
      Join("half1", (self._pool(), self._half("conv4", 96))),
      Join("mixed", branches),
      Join("half2", (self._half("conv5", 192), self._pool())),
    )
    return Chain("stem", layers)

  def a(self) -> Join:
    return self._block(
      ((96, 1),), ((96, 1),), ((64, 1), (96, 3)), ((64, 1), (96, 3), (96, 3))
    )

  def b(self) -> Join:
    return self._block(
      ((128, 1),),
      ((384, 1),),
      ((192, 1), (224, (1, 7)), (256, (7, 1))),
      ((192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))),
    )

  def c(self) -> Join:
    few = (self._conv("few_0", 384, 1), self._fork("few"))
    many = self._chain("many_in", (384, 1), (448, (3, 1)), (512, (1, 3)))
    branches = (
      Chain("pooled", (MeanPool("pool"), self._conv("pool_1", 256, 1))),
      self._conv("one", 256, 1),
      Chain("few", few),
      Chain("many", (many, self._fork("many"))),
    )
    return Join("block", branches)

  def reduce_a(self) -> Join:
    few = self._chain("few", (192, 1), (224, 3))
    branches = (
      self._pool(),
      self._half("conv", 384),
      Chain("deep", (few, self._half("deep", 256))),
    )
    return Join("block", branches)

  def reduce_b(self) -> Join:
    few = self._chain("few", (192, 1))
    many = self._chain("many", (256, 1), (256, (1, 7)), (320, (7, 1)))
    branches = (
      self._pool(),
      Chain("narrow", (few, self._half("narrow", 192))),
      Chain("wide", (many, self._half("wide", 320))),
    )
    return Join("block", branches)

  def _block(self, pooled: "_Convs", *others: "_Convs") -> Join:
    mean = Chain("pooled", (MeanPool("pool"), self._chain("pool", *pooled)))
    chains = [self._chain(f"way{i}", *c) for i, c in enumerate(others)]
    return Join("block", (mean, *chains))

  def _fork(self, name: str) -> Join:
    wide = self._conv(f"{name}_wide", 256, (1, 3))
    tall = self._conv(f"{name}_tall", 256, (3, 1))
    return Join(f"{name}_fork", (wide, tall))

  def _chain(self, name: str, *convs: tuple[int, "_Size"]) -> Chain:
    layers: list[Layer] = []
    for i, (features, size) in enumerate(convs):
      layers.append(self._conv(f"{name}_{i}", features, size))
    return Chain(name, tuple(layers))

  def _half(self, name: str, features: int) -> Conv:
    return self._conv(f"{name}_half", features, 3, 2, self._edge)

  def _pool(self) -> MaxPool:
    return MaxPool("pool", 3, padding=self._edge)

  @property
  def _edge(self) -> int:
    return int(self._small)

  def _conv(
    self,
    name: str,
    features: int,
    size: "_Size",
    stride: int = 1,
    padding: int | None = None,
  ) -> Conv:
    (features,) = scaled((features,), self._width)
    return Conv(name, features, size, stride, padding, norm=True)


_Size = int | tuple[int, int]
_Convs = tuple[tuple[int, _Size], ...]
