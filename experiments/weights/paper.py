"""Figures that the authors of A2DTWP published.

Zhuang, Malossi and Casas, *Reducing Data Motion to Accelerate the Training of
Deep Neural Networks*, 2020, arXiv:2004.02297.
"""

from typing import NamedTuple

SOURCE = "arXiv:2004.02297"
SYSTEMS = {"x86": "4 x GK210, PCIe 3 x8", "power": "4 x V100, NVLink 2"}
GPUS = 4


class Profile(NamedTuple):
  """Milliseconds of one batch, by its parts."""

  host_to_device: float  # Transfer of the weights.
  device_to_host: float  # Transfer of the gradients.
  convolution: float  # Convolutions, forward and backward.
  fully_connected: float  # Fully connected layers, forward and backward.
  update: float  # Update of the weights.
  norm: float = 0.0  # Norms of the weights; 0 where no controller reads them.
  pack: float = 0.0  # Packing on the host.
  unpack: float = 0.0  # Unpacking on the device.

  @property
  def compute(self) -> float:
    """Milliseconds of the forward and the backward pass."""
    return self.convolution + self.fully_connected


PROFILES = {
  ("x86", "fp32"): Profile(153.93, 68.51, 128.72, 33.51, 54.39),
  ("x86", "a2dtwp"): Profile(
    52.27, 73.55, 126.13, 34.17, 52.86, 3.88, 19.71, 4.51
  ),
  ("power", "fp32"): Profile(39.12, 17.34, 69.78, 12.66, 41.29),
  ("power", "a2dtwp"): Profile(
    12.21, 17.87, 71.21, 13.51, 42.98, 0.93, 10.51, 1.11
  ),
}
"""VGG-A at batch 64, by system and case."""

BATCHES = {
  "alexnet": (16, 32, 64),
  "vgg_a": (16, 32, 64),
  "resnet34": (32, 64, 128),
}
"""Batch sizes over all GPUs, by network."""

TIME_TO_ERROR = {
  ("x86", "a2dtwp"): {
    "alexnet": (0.893, 0.934, 0.994),
    "vgg_a": (0.927, 0.949, 0.871),
    "resnet34": (0.969, 0.956, 0.951),
  },
  ("x86", "best_static"): {
    "alexnet": (0.884, 0.890, 0.909),
    "vgg_a": (0.918, 0.843, 0.853),
    "resnet34": (0.921, 0.857, 0.854),
  },
  ("power", "a2dtwp"): {
    "alexnet": (0.814, 0.858, 0.900),
    "vgg_a": (0.718, 0.799, 0.889),
    "resnet34": (0.979, 0.931, 0.885),
  },
  ("power", "best_static"): {
    "alexnet": (0.791, 0.832, 0.876),
    "vgg_a": (0.709, 0.752, 0.860),
    "resnet34": (0.933, 0.889, 0.772),
  },
}
"""Time to an error threshold over that of fp32, by system and case.

There is one value for each of `BATCHES`.
"""
