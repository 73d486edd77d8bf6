"""All networks that `make_network` knows by name."""

from collections.abc import Callable
from typing import Any

from experiments.models import classic, inception, network
from experiments.models.gpt import gpt
from experiments.models.inception import googlenet
from experiments.models.resnet import DEPTHS, block_kind, resnet
from jaxmotion import core

NETWORKS: dict[str, Callable[..., network.Network]] = {
  "alexnet": classic.alexnet,
  "vgg": classic.vgg,
  "googlenet": googlenet,
  "squeezenet": classic.squeezenet,
  "nin": classic.nin,
  "inception_v4": inception.inception_v4,
  "resnet": resnet,
  "gpt": gpt,
}
"""Function that makes a network, by its name; it documents its options."""

_NAMED: dict[str, dict[str, Any]] = {
  "vgg11": {"depth": 11},
  "vgg16": {"depth": 16},
} | {
  f"resnet{n}": {"blocks": blocks, "block": block_kind(n)}
  for n, blocks in DEPTHS.items()
}


def make_network(name: str, **options: Any) -> network.Network:
  """Makes a network by its name, with options of its own function.

  >>> net = make_network("resnet50")
  >>> net.size
  25557032
  >>> [(name, repeats) for name, _, repeats in net.stages][1:5]
  [('stage1_first', 1), ('stage1_rest', 2), ('stage2_first', 1), \
('stage2_rest', 3)]
  >>> make_network("resnet", blocks=(3, 138, 690, 3)).name
  'resnet2504'
  """
  # All networks have the options `classes` and `width`, a factor of all
  # channels. Networks of images have `image`, their height and width from 32
  # up. "resnet" has the `blocks` of each stage.
  core.choice((*NETWORKS, *_NAMED))("name", name)
  if name in _NAMED:
    options = _NAMED[name] | options
    name = name.rstrip("0123456789")
  return NETWORKS[name](**options)
