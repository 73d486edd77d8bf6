"""Networks and batches that residuals are measured on, by name and options."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments import models


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


def parse_networks(texts: Sequence[str]) -> list[NetworkSpec]:
  """Parses networks and batches of a command line.

  Args:
    texts: each NAME:BATCH, followed by :OPTION=NUMBER for each option of the
      network.

  Raises:
    ValueError: a text has another form.

  Example:
    >>> [spec] = parse_networks(["gpt:8:layers=48"])
    >>> spec.name, spec.batch, spec.options
    ('gpt', 8, {'layers': 48})
    >>> spec.case
    'gpt_layers48_batch8'
  """
  return [_parse_network(text) for text in texts]


def _parse_network(text: str) -> NetworkSpec:
  try:
    name, batch, *options = text.split(":")
    pairs = [option.split("=") for option in options]
    return NetworkSpec(name, int(batch), {k: json.loads(v) for k, v in pairs})
  except ValueError as e:
    raise ValueError(
      f"`networks` must be NAME:BATCH or NAME:BATCH:OPTION=NUMBER, got {text!r}"
      "."
    ) from e
