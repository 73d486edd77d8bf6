"""Networks and models that a command line names, with their options."""

import functools
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments import models
from experiments.common import console, names
from experiments.common.names import check_name, parse_options
from experiments.models import losses


class NetworkSpec(NamedTuple):
  """A network with its options and a batch size."""

  name: str  # Name of the network, for `models.make_network`.
  batch: int  # Number of examples in the batch.
  options: Mapping[str, Any] = MappingProxyType({})  # Options of the network.

  @property
  def case(self) -> str:
    """The name of the network and its batch in rows."""
    options = "".join(f"_{k}{v}" for k, v in self.options.items())
    return f"{self.name}{options}_batch{self.batch}"

  def make_network(self) -> models.Network:
    """Makes the network with its options."""
    return models.make_network(self.name, **self.options)


def parse_network(text: str) -> NetworkSpec:
  """Parses a network and a batch of a command line.

  >>> spec = parse_network("gpt:8:layers=48")
  >>> spec.name, spec.batch, spec.options
  ('gpt', 8, {'layers': 48})
  >>> spec.case
  'gpt_layers48_batch8'
  """
  name, _, rest = text.partition(":")
  names.check_name(name, list_networks(), "NAME")
  batch, *options = rest.split(":")
  if not batch.isdecimal() or int(batch) < 1:
    raise console.JobError(
      f"must be NAME:BATCH or NAME:BATCH:OPTION=NUMBER, got {text!r}."
    )
  found = names.parse_options(options, list_options(name), name)
  spec = NetworkSpec(name, int(batch), found)
  try:
    spec.make_network()
  except (TypeError, ValueError, ArithmeticError) as error:
    raise console.JobError(
      f"must be a network that can be made, got {text!r}: {error}"
    ) from error
  return spec


def list_networks() -> list[str]:
  """Returns the names that `models.make_network` takes.

  >>> list_networks()[-1]
  'resnet2504'
  """
  resnets = [f"resnet{layers}" for layers in models.DEPTHS]
  return [*models.NETWORKS, "vgg11", "vgg16", *resnets]


def list_options(network: str) -> list[str]:
  """Returns the names of the options of a network.

  >>> list_options("alexnet")[:3]
  ['image', 'classes', 'width']
  """
  make = models.NETWORKS.get(network)
  if make is None:  # Such as resnet50, which is a resnet.
    make = models.NETWORKS[network.rstrip("0123456789")]
  return list(inspect.signature(make).parameters)


def check_model(text: str) -> str:
  """Returns the text of a model that can be made."""
  name, *options = text.split(":")
  check_name(name, losses.TASKS, "NAME")
  parse_options(options, _list_task_options(name), name)
  if options:
    try:
      losses.parse_task(text)()
    except (TypeError, ValueError, ArithmeticError) as error:
      reason = " ".join(str(error).split())
      raise console.JobError(
        f"must be a model that can be made, got {text!r}: {reason}"
      ) from error
  return text


def _list_task_options(name: str) -> list[str]:
  """Returns the options that a model takes on the command line."""
  make = losses.TASKS[name]
  fixed = make.keywords if isinstance(make, functools.partial) else {}
  names = [
    p.name
    for p in inspect.signature(make).parameters.values()
    if p.kind is p.KEYWORD_ONLY and p.name not in fixed
  ]
  # Further options of a classifier are those of its network.
  network = fixed.get("network")
  return names + (list_options(network) if network else [])


# Figures over all networks of three publications. Jin et al., *Layrub:
# layer-centric GPU memory reuse and data migration in extreme-scale deep
# learning systems*, ACM TACO 2018; *Layup: layer-adaptive and multi-type
# intermediate-oriented memory optimization for GPU-based CNNs*, ACM TACO 2019;
# Wang et al., *SuperNeurons: dynamic GPU memory management for training deep
# neural networks*, PPoPP 2018 (arXiv:1801.04380).
PUBLISHED = (
  ("layrub/mean", "saved_percent", 58.2, "%", "Layrub, TACO 2018"),
  ("layrub/best", "saved_percent", 98.9, "%", "Layrub, TACO 2018"),
  ("layrub/mean", "step_percent", 24.1, "%", "Layrub, TACO 2018"),
  ("layup/mean", "saved_percent", 66.0, "%", "Layup, TACO 2019"),
  ("layrub/12GB", "deepest", 1517, "layers", "Layrub, TACO 2018"),
  ("layup/12GB", "deepest", 2504, "layers", "Layup, TACO 2019"),
  ("superneurons/12GB", "deepest", 1920, "layers", "Layup, TACO 2019"),
)
"""Case, metric, value, unit and publication of each figure."""

NETWORKS = (
  *("alexnet:256", "vgg16:64", "googlenet:32", "resnet50:32", "resnet101:32"),
  *("resnet152:32", "inception_v4:16", "resnet1001:16", "resnet1517:16"),
  *("resnet2504:16", "gpt:8"),
)
"""Networks and batches of the papers, and a transformer."""
