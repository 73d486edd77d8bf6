"""Exchanges that are timed on hosts, and the worker module of each kind."""

from typing import Any

from experiments.common import names
from experiments.hosts import carriers, torch_worker
from experiments.train import cases, presets

EXCHANGE_CASES = ("none", *cases.EXCHANGES)
"""Names of the default cases of jaxmotion; `none` exchanges nothing."""

LOCAL_CASES: dict[str, dict[str, Any]] = {
  "diloco8_fp32": {"every": 8},
  "diloco8_int4": {"every": 8, "codec": cases.EXCHANGES["int4_feedback"]},
  "streaming8_int4": {
    "every": 8,
    "fragments": 4,
    "delay": 1,
    "codec": cases.EXCHANGES["int4_feedback"],
  },
}
"""Options of `local_updates` by name of the case; a step is a mean of 8."""

ONE_PROGRAM = "one_program_"
"""Prefix of an exchange that does not overlap with its own step."""

PEER_CASES = tuple(torch_worker.CASES)
"""Names of the cases of PyTorch."""

EXCHANGE_WORKER = "experiments.hosts.jax_worker"
PEER_WORKER = "experiments.hosts.torch_worker"


def check_case(case: str) -> str:
  """Returns the name of a case if there is one of this name."""
  exchanges = (*cases.EXCHANGES, *cases.SHARDED, *presets.PRESETS)
  if carriers.is_carrier(case) or cases.undelayed_name(
    case.removeprefix(ONE_PROGRAM)
  ) in (exchanges):
    return case
  names.check_name(case, ("none", *LOCAL_CASES, *exchanges))
  return case
