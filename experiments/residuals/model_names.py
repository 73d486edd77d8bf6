"""Names and options of networks and models that a command line gives."""

import functools
import inspect

from experiments import models
from experiments.common import console
from experiments.common.names import check_name, parse_options
from experiments.models import losses


def list_networks() -> list[str]:
  """Returns the names that `models.make_network` takes.

  >>> list_networks()[-1]
  'resnet2504'
  """
  resnets = [f"resnet{layers}" for layers in models.DEPTHS]
  return [*models.NETWORKS, "vgg11", "vgg16", *resnets]


def list_options(network: str) -> list[str]:
  """Returns the names of the options of a network.

  Args:
    network: name of the network.

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
