"""Exchanges that are timed on hosts, and the worker module of each kind."""

from collections.abc import Sequence

from experiments.hosts import torch_worker
from experiments.train.cases import EXCHANGES, check_exchange

EXCHANGE_CASES = ("none", *EXCHANGES)
"""Names of the default cases of jaxmotion; `none` exchanges nothing."""

PEER_CASES = tuple(torch_worker.CASES)
"""Names of the cases of PyTorch."""

EXCHANGE_WORKER = "experiments.hosts.jax_worker"
PEER_WORKER = "experiments.hosts.torch_worker"


def check_cases(exchanges: Sequence[str], peers: Sequence[str]) -> None:
  """Raises if a case does not exist.

  Args:
    exchanges: names that should be `none` or exchanges of `experiments.train`.
    peers: names that should be some of `PEER_CASES`.

  Raises:
    ValueError: a name is none of them.
  """
  for case in exchanges:
    if case != "none":
      check_exchange(case)
  for case in peers:
    if case not in PEER_CASES:
      raise ValueError(
        f"`--peers` must name some of {', '.join(PEER_CASES)}, got {case!r}."
      )
