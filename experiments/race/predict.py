"""Predicted time of the exchange of a case over a link."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from experiments.hosts import links
from experiments.race import cases
from experiments.train.cases import EXCHANGES, undelayed_name
from jaxmotion import perfmodel

_HOSTS = 2
_PACKET_BYTES = 1514  # Of Ethernet, with headers.
# Two hosts agree on a message before one sends it: a round trip.
_ROUND_TRIP_S = 1e-4  # Without a relay.


def make_platform(link: cases.Link) -> perfmodel.Platform:
  """Returns two hosts of two shared cores with a link between them."""
  payload = 1 - links.HEADER_BYTES / _PACKET_BYTES
  rate = perfmodel.gbit_per_s(payload * links.parse_rate(link.rate) / 1e9)
  axis = perfmodel.Axis(
    name="data",
    workers=_HOSTS,
    link=perfmodel.Link(latency_s=_ROUND_TRIP_S + link.rtt_ms / 1e3, rate=rate),
  )
  platform = perfmodel.builtin_platform("cpu2")
  return dataclasses.replace(platform, name=link.rate, axes=(axis,), sources={})


def exchange_seconds(
  case: str, facts: Mapping[str, Any], params: Any, link: cases.Link
) -> float:
  """Predicts codec and link seconds of a case's exchange, mean of a step."""
  # `facts`: what the worker replied to the command to start.
  platform = make_platform(link)
  (axis,) = platform.axes
  # Those of one kind are under way together, and so wait for one another once.
  together: dict[str, float] = {}
  for op, payload, count in facts["moves"]:
    together[op] = together.get(op, 0.0) + count * payload
  rounds = cases.ROUNDS.get(case, 1)
  sent = math.fsum(
    rounds
    * perfmodel.collective_seconds(op, payload / rounds, _HOSTS, axis.link)
    for op, payload in together.items()
  )
  name = undelayed_name(case)
  if name not in EXCHANGES:  # Codecs of others were not calibrated.
    return sent / facts["share"]
  exchange = perfmodel.predict_exchange(
    params, platform, "data", EXCHANGES[name]
  )
  recoding = exchange.encode_s + exchange.recode_s + exchange.decode_s
  return sent / facts["share"] + recoding
