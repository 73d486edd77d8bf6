"""Exchanges that are timed on hosts, and the worker module of each kind."""

from collections.abc import Sequence
from typing import Any

from experiments.hosts import torch_worker
from experiments.hosts.carriers import is_carrier
from experiments.train.cases import EXCHANGES, check_exchange

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


def check_cases(exchanges: Sequence[str], peers: Sequence[str]) -> None:
  """Raises if a case does not exist.

  Args:
    exchanges: names that should be `none`, exchanges of `experiments.train`,
      `LOCAL_CASES` or collectives alone.
    peers: names that should be some of `PEER_CASES`.

  Raises:
    ValueError: a name is none of them.
  """
  for case in exchanges:
    if case != "none" and case not in LOCAL_CASES and not is_carrier(case):
      check_exchange(case.removeprefix(ONE_PROGRAM))
  for case in peers:
    if case not in PEER_CASES:
      raise ValueError(
        f"`--peers` must name some of {', '.join(PEER_CASES)}, got {case!r}."
      )
