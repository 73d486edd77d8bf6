"""The smallest network with a convolution, a pooling, a loop and a head."""

from experiments.models import Network, Stage
from experiments.models.layers import MEAN, Add, Chain, Conv, Dense, MaxPool
from experiments.models.network import make_classifier


def make_tiny(
  *,
  image: int = 32,
  classes: int = 10,
  width: float = 1.0,
  repeats: int = 3,
  stride: int = 4,
) -> Network:
  """Returns a network whose programs compile in a tenth of a ResNet's time.

  Args:
    image: height and width of the images.
    classes: number of labels.
    width: factor of the 8 channels.
    repeats: number of times that the residual block runs.
    stride: of the first convolution: 4, or 1 for larger activations.
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
