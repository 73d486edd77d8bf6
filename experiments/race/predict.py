"""Predicted time of exchanges over a link, and of steps by `planner.advise`."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import optax

from experiments.hosts import links
from experiments.race import cases
from experiments.train.cases import EXCHANGES, KERNEL_CODECS, undelayed_name
from experiments.train.decoder import Decoder
from jaxmotion import codecs, core, perfmodel, planner

_HOSTS = 2
_PACKET_BYTES = 1514  # Of Ethernet, with headers.
# Two hosts agree on a message before one sends it: a round trip.
_ROUND_TRIP_S = 1e-4  # Without a relay.
_FACTORS = codecs.low_rank(rank=4)
_CODECS = EXCHANGES | {"power_sgd": _FACTORS, "torch_powersgd4": _FACTORS}
"""Codec whose time is predicted, by case."""


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
  codec = _CODECS.get(undelayed_name(case))
  if codec is None:
    return sent / facts["share"]
  exchange = perfmodel.predict_exchange(params, platform, "data", codec)
  recoding = exchange.encode_s + exchange.recode_s + exchange.decode_s
  return sent / facts["share"] + recoding


_ADVISED = {EXCHANGES[case]: case for case in ("fp32", "bf16")} | {
  codec: case for case, codec in KERNEL_CODECS.items()
}
"""Case by the codec of all matrices."""
_PIECES = 3
"""Parts of the gradient that hosts send one by one while they compute."""


def advise_steps(
  link: cases.Link, decoder: Decoder, alone_s: float
) -> dict[str, float]:
  """Returns seconds of a step of the cases that `planner.advise` names."""
  # alone_s: seconds of the step of one host, which corrects the prediction.
  network = decoder.network
  plan = planner.advise(
    network.loss,
    network.params,
    (decoder.make_batch(0, 0, 0, _HOSTS),),
    make_platform(link),
    candidates=tuple(_ADVISED),
    optimizer=optax.adamw(cases.BASE_RATE),
    bucket_bytes=core.tree_bytes(network.params) // _PIECES,
  )
  plan = planner.replan(plan, compute_s=alone_s)
  if plan.alternative is None:
    # Cases send all matrices with one codec: that of most elements here.
    sizes: collections.Counter[str] = collections.Counter()
    for choice in plan.choices:
      sizes[_ADVISED[choice.codec]] += math.prod(choice.shape)
    return {max(sizes, key=sizes.__getitem__): plan.step.total_s}
  presets = re.compile(r"presets\.(\w+)")
  return {
    found[1]: choice.step_s
    for choice in plan.algorithms
    if (found := presets.search(choice.name))
    and found[1] in cases.LOCAL
    and choice.step_s is not None
  }
