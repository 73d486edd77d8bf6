"""Cases of the race: their workers, learning rates and what they send."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import jaxmotion
from experiments.hosts import torch_worker
from experiments.train.cases import EXCHANGES, exchange_with
from jaxmotion import Scheme, presets

EVERY = torch_worker.LOCAL_EVERY
"""Steps between two exchanges of local updates, those of PyTorch's too."""


class Link(NamedTuple):
  """A link between two hosts."""

  rate: str  # As `experiments.hosts.links.parse_rate` takes it.
  rtt_ms: float  # Round trip that is added.


LINKS = {
  "1gbit": Link("1gbit", 0.0),
  "100mbit": Link("100mbit", 0.0),
  "20mbit_rtt50ms": Link("20mbit", 50.0),
}
"""Links of the race by name."""

LOCAL: dict[str, Callable[[optax.GradientTransformation], Scheme]] = {
  "diloco": lambda inner: presets.diloco(
    inner, every=EVERY, codec=EXCHANGES["int4_feedback"]
  ),
  "streaming_diloco": lambda inner: presets.streaming_diloco(
    inner, every=EVERY
  ),
  "sparse_loco": lambda inner: jaxmotion.local_updates(
    inner, presets.sparse_loco("data", 1.0), every=EVERY
  ),
}
"""Scheme of hosts that train apart, made from the optimizer of each."""

OURS = (
  *("none", "fp32", "bf16", "int8", "int4_feedback", "sign_feedback"),
  *("topk1_feedback", "power_sgd", "delayed_int4_feedback", *LOCAL),
  "sharded_int8",
)
"""Cases of jaxmotion; `none` is one host that computes all samples."""

PEERS = (
  *("torch_none", "torch_fp32", "torch_fp16", "torch_bf16"),
  *("torch_powersgd4", "torch_post_local"),
)
"""Cases of PyTorch; `torch_none` is one host that computes all samples."""

CASES = (*OURS, *PEERS)
"""All cases by name."""

IN_FLIGHT = ("streaming_diloco",)
"""Cases that send beside later steps."""

# Gradients are sent while others are computed: in `experiments.hosts`, 12 to
# 34 % of a step were so hidden at 100 Mbit/s.
OVERLAPPED = {case: 0.25 for case in OURS if case not in LOCAL}
"""Share of a step's time beside which a case sends; for others hosts wait."""

ROUNDS = {"power_sgd": 2, "torch_powersgd4": 3}
"""Sums of a step that wait for one another, of cases with more than one."""

BASE_RATE = 1e-3
"""Learning rate that trials begin with, and that a case has without trials."""


def is_alone(case: str) -> bool:
  """Says whether a case is one host, which sends nothing."""
  return case in ("none", "torch_none")


def is_peer(case: str) -> bool:
  """Says whether a case trains with PyTorch."""
  return case in PEERS


def alone_name(case: str) -> str:
  """Returns the case of one host with the same framework."""
  return "torch_none" if is_peer(case) else "none"


def make_scheme(
  case: str, mesh: jax.sharding.Mesh, tx: optax.GradientTransformation
) -> Scheme | optax.GradientTransformation:
  """Returns how a case of jaxmotion trains."""
  if case in LOCAL:
    return LOCAL[case](tx)
  return exchange_with(mesh, "fp32" if is_alone(case) else case, tx)


def peer_bytes(case: str, params: Any, steps: int) -> float:
  """Returns the bytes of the sums of a case of PyTorch, mean of a step."""
  shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
  total = sum(_peer_array_bytes(case, shape) for shape in shapes)
  if case != "torch_post_local":
    return total
  # Its first steps sum gradients, then each period sums parameters once.
  return total * (EVERY + (steps - EVERY) / EVERY) / steps


def _peer_array_bytes(case: str, shape: tuple[int, ...]) -> float:
  size = 1
  for length in shape:
    size *= length
  match case:
    case "torch_fp16" | "torch_bf16":
      return 2 * size
    case "torch_powersgd4":
      factors = 4 * sum(shape)
      # It compresses what factors make half as large at least.
      return 4 * (factors if len(shape) == 2 and 2 * factors < size else size)
  return 4 * size
