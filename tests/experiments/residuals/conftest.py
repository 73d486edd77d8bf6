from collections.abc import Iterator

import pytest

from experiments.models import Network, Stage, catalog
from experiments.models.layers import MEAN, Add, Chain, Conv, Dense, MaxPool
from experiments.models.network import make_classifier


def _make_tiny(
  *,
  image: int = 32,
  classes: int = 10,
  width: float = 1.0,
  repeats: int = 3,
  stride: int = 4,
) -> Network:
  """Returns the smallest network with a pooling, a repeated block and a head.

  Its programs compile in a tenth of a ResNet's time.
  """
  channels = max(1, round(8 * width))
  pool = (
    MaxPool("pool", 3, 1, padding=1) if stride > 1 else MaxPool("pool", 4, 4)
  )
  stem = Conv("conv", channels, stride=stride, norm=True), pool
  body = Conv("a", channels, norm=True, relu=False)
  head = MEAN, Dense("dense", classes, relu=False)
  stages = [
    Stage("stem", Chain("stem", stem)),
    Stage("body", Add("add", body), repeats),
    Stage("logits", Chain("logits", head)),
  ]
  return make_classifier("tiny", stages, image)


@pytest.fixture(scope="package", autouse=True)
def tiny_network() -> Iterator[None]:
  """Adds the network `tiny` to those that `make_network` knows."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(catalog.NETWORKS, "tiny", _make_tiny)
    yield
