"""Figures that the authors of Layrub, Layup and SuperNeurons published.

Jin et al., *Layrub: layer-centric GPU memory reuse and data migration in
extreme-scale deep learning systems*, ACM TACO 2018; *Layup: layer-adaptive and
multi-type intermediate-oriented memory optimization for GPU-based CNNs*, ACM
TACO 2019; Wang et al., *SuperNeurons: dynamic GPU memory management for
training deep neural networks*, PPoPP 2018 (arXiv:1801.04380). Only figures over
all networks are here.
"""

from typing import NamedTuple


class Published(NamedTuple):
  """One published figure, as a row.

  Attributes:
    case: case of the row.
    metric: metric of the row.
    value: value as printed.
    unit: unit of the value.
    source: publication of the figure.
  """

  case: str
  metric: str
  value: float
  unit: str
  source: str


PUBLISHED = (
  Published("layrub/mean", "saved_percent", 58.2, "%", "Layrub, TACO 2018"),
  Published("layrub/best", "saved_percent", 98.9, "%", "Layrub, TACO 2018"),
  Published("layrub/mean", "step_percent", 24.1, "%", "Layrub, TACO 2018"),
  Published("layup/mean", "saved_percent", 66.0, "%", "Layup, TACO 2019"),
  Published("layrub/12GB", "deepest", 1517, "layers", "Layrub, TACO 2018"),
  Published("layup/12GB", "deepest", 2504, "layers", "Layup, TACO 2019"),
  Published("superneurons/12GB", "deepest", 1920, "layers", "Layup, TACO 2019"),
)

NETWORKS = (
  "alexnet:256",
  "vgg16:64",
  "googlenet:32",
  "resnet50:32",
  "resnet101:32",
  "resnet152:32",
  "inception_v4:16",
  "resnet1001:16",
  "resnet1517:16",
  "resnet2504:16",
  "gpt:8",
)
"""Networks and batches of the papers, and a transformer."""
