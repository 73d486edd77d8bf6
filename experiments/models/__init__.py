"""The networks of the memory experiments: pure functions of pytrees.

A network is a chain of stages. A stage's block is `block(params, x) -> x`; one
that repeats has stacked parameters and is run by `lax.scan`. Whatever is done
to save memory is put around each block: `net.loss(params, batch, wrap=...)`.
Everything is float32 with channels last; batch norm uses the batch's own
statistics and keeps none, and there is no dropout, so that a block is a
function of its parameters and its input alone.
"""

from collections.abc import Callable
from typing import Any

from experiments.models.classic import (
  alexnet,
  googlenet,
  nin,
  squeezenet,
  vgg16,
)
from experiments.models.gpt import gpt
from experiments.models.inception import inception_v4
from experiments.models.network import (
  Block as Block,
  Network as Network,
  Stage as Stage,
  Wrap as Wrap,
  cross_entropy as cross_entropy,
  repeat as repeat,
)
from experiments.models.resnet import (
  DEPTHS as DEPTHS,
  depth as depth,
  resnet,
)
from jaxmotion.core import check_choice

NETWORKS: dict[str, Callable[..., Network]] = {
  "alexnet": alexnet,
  "vgg16": vgg16,
  "googlenet": googlenet,
  "squeezenet": squeezenet,
  "nin": nin,
  "inception_v4": inception_v4,
  "resnet": resnet,
  "gpt": gpt,
}
"""What makes a network, by its name; see there for its options."""


def make(name: str, **options: Any) -> Network:
  """Makes a network.

  Args:
    name: of `NETWORKS`, or "resnetN" for one of the `DEPTHS`.
    **options: of all networks `classes` and `width`, which scales all channels;
      of those of images `image`, their height and width from 32 up; of "resnet"
      the `blocks` of each stage; of "gpt" `layers`, `heads` and `length`.

  Raises:
    ValueError: another name, or an option that is out of range.

  Example:
    >>> net = make("resnet50")
    >>> net.size
    25557032
    >>> [(name, repeats) for name, _, repeats in net.stages][1:5]
    [('stage1_first', 1), ('stage1_rest', 2), ('stage2_first', 1), \
('stage2_rest', 3)]
    >>> make("resnet", blocks=(3, 138, 690, 3)).name
    'resnet2504'
  """
  named = {f"resnet{n}": blocks for n, blocks in DEPTHS.items()}
  check_choice("name", name, (*NETWORKS, *named))
  if name in named:
    return resnet(named[name], **options)
  return NETWORKS[name](**options)
