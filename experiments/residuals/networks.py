"""Networks and batches that residuals are measured on, by name and options."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments import models
from experiments.common import console, names
from experiments.residuals import model_names


class NetworkSpec(NamedTuple):
  """A network with its options and a batch size.

  Attributes:
    name: name of the network, for `models.make_network`.
    batch: number of examples in the batch.
    options: options of the network.
  """

  name: str
  batch: int
  options: Mapping[str, Any] = MappingProxyType({})

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

  Args:
    text: NAME:BATCH, followed by :OPTION=NUMBER for each option of the
      network.

  Raises:
    JobError: there is no such network or option, or the text has another form.

  Example:
    >>> spec = parse_network("gpt:8:layers=48")
    >>> spec.name, spec.batch, spec.options
    ('gpt', 8, {'layers': 48})
    >>> spec.case
    'gpt_layers48_batch8'
  """
  name, _, rest = text.partition(":")
  names.check_name(name, model_names.list_networks(), "NAME")
  batch, *options = rest.split(":")
  if not batch.isdecimal() or int(batch) < 1:
    raise console.JobError(
      f"must be NAME:BATCH or NAME:BATCH:OPTION=NUMBER, got {text!r}."
    )
  found = names.parse_options(options, model_names.list_options(name), name)
  spec = NetworkSpec(name, int(batch), found)
  try:
    spec.make_network()
  except (TypeError, ValueError, ArithmeticError) as error:
    raise console.JobError(
      f"must be a network that can be made, got {text!r}: {error}"
    ) from error
  return spec
