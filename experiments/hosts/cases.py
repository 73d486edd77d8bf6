"""Exchanges that are timed on hosts, and the worker module of each kind."""

from typing import Any

from experiments.common.names import check_name
from experiments.hosts import torch_worker
from experiments.hosts.carriers import is_carrier
from experiments.train.cases import EXCHANGES, SHARDED, split_delay
from experiments.train.presets import PRESETS

EXCHANGE_CASES = ("none", *EXCHANGES)
"""Names of the default cases of jaxmotion; `none` exchanges nothing."""

LOCAL_CASES: dict[str, dict[str, Any]] = {
  "diloco8_fp32": {"every": 8},
  "diloco8_int4": {"every": 8, "codec": EXCHANGES["int4_feedback"]},
  "streaming8_int4": {
    "every": 8,
    "fragments": 4,
    "delay": 1,
    "codec": EXCHANGES["int4_feedback"],
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
  """Returns the name of a case if there is one of this name.

  Args:
    case: `none`, an exchange of `experiments.train`, one of `LOCAL_CASES` or a
      collective alone.

  Raises:
    ValueError: it is none of them.
  """
  exchanges = (*EXCHANGES, *SHARDED, *PRESETS)
  if is_carrier(case) or split_delay(case.removeprefix(ONE_PROGRAM))[0] in (
    exchanges
  ):
    return case
  check_name(case, ("none", *LOCAL_CASES, *exchanges))
  return case
