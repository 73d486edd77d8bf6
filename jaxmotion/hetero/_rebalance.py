"""Shares that follow the speeds while training runs."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmotion.core import check_fraction, check_int
from jaxmotion.hetero._shares import integer_shares, makespan_s


class RebalanceState(NamedTuple):
  """State of `rebalance`: plain Python numbers, the same on every process.

  Attributes:
    counts: units of each worker from now on.
    unit_s: the last times that each worker took for a unit, the newest last.
    moves: times that the counts have changed.
    skipped: measurements that were no times.
  """

  counts: tuple[int, ...]
  unit_s: tuple[tuple[float, ...], ...]
  moves: int
  skipped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class rebalance:
  """Moves work from slow workers to fast ones when that makes steps shorter.

  A worker's speed is that of its median time for a unit over the last
  `window` measurements: one slow step moves nothing. With n the counts, n*
  those of `integer_shares` at these speeds and T the time of the last worker,

    n <- n* if T(n*) <= (1 - margin) T(n)

  so that noise does not move work to and fro: a move has to pay. It waits until
  every worker with work was measured, and a change of speed is acted on after
  `window // 2 + 1` measurements.

  It runs on the host. Of several processes each has to be told the same times,
  of all workers: the metrics of a step carry them to everyone.

  Args:
    total: units in a step; every split has this sum.
    workers: how many there are.
    caps: most units that each worker has memory for; None is no limit.
    fixed_s: seconds that a worker takes besides its units, of each or of all.
    least: units that every worker keeps, if its cap allows. A worker without
      work is not measured, so it would not be seen to recover.
    margin: least gain, a share of the step's time, that is worth a move.
    window: measurements of each worker that count.

  Raises:
    TypeError, ValueError: an argument that is none of these.

  Example:
    >>> balance = rebalance(total=28, workers=4, window=1)
    >>> state = balance.init()
    >>> state.counts
    (7, 7, 7, 7)
    >>> state = balance.update((0.7, 0.7, 0.7, 1.4), state)
    >>> state.counts, [round(v) for v in balance.speeds(state)]
    ((8, 8, 8, 4), [10, 10, 10, 5])
    >>> balance.update((0.8, 0.81, 0.79, 0.8), state).counts
    (8, 8, 8, 4)

  References:
    Chen, Weng, Wang, Li and Li, *Semi-dynamic load balancing: efficient
    distributed learning in non-dedicated environments*, 2020, resize batches
    by predicted speeds in the same way.
  """

  total: int
  workers: int
  caps: tuple[int, ...] | None = None
  fixed_s: float | tuple[float, ...] = 0.0
  least: int = 1
  margin: float = 0.05
  window: int = 5

  def __post_init__(self) -> None:
    check_int("workers", self.workers, 1)
    check_int("total", self.total, 1)
    check_fraction("margin", self.margin)
    check_int("window", self.window, 1)
    self._split((1.0,) * self.workers)  # Caps, fixed times, least.

  def init(self, speeds: Sequence[float] | None = None) -> RebalanceState:
    """Returns the state before the first measurement.

    Args:
      speeds: units a second of each worker, if they are known; equal shares
        are where it starts otherwise.
    """
    known = (1.0,) * self.workers if speeds is None else speeds
    return RebalanceState(self._split(known), ((),) * self.workers, 0, 0)

  def update(
    self, seconds: Sequence[float], state: RebalanceState
  ) -> RebalanceState:
    """Returns the state after a step that took these times.

    Args:
      seconds: of each worker for its own work in the step, without what it
        waited for others; of one that had no work it is ignored. A time that
        is not finite, or not more than `fixed_s`, is skipped.
      state: what `init` or the last `update` returned, which gave the counts.

    Raises:
      ValueError: not as many times as workers.
    """
    if len(seconds) != self.workers:
      raise ValueError(
        f"`seconds` must be {self.workers} times, got {tuple(seconds)}."
      )
    unit_s, skipped = list(state.unit_s), state.skipped
    fixed_s = np.broadcast_to(self.fixed_s, self.workers).tolist()
    for i, (n, s) in enumerate(zip(state.counts, seconds, strict=True)):
      took = float(s) - fixed_s[i]
      if n and math.isfinite(took) and took > 0:
        unit_s[i] = (*unit_s[i], took / n)[-self.window :]
      elif n:
        skipped += 1
    return self._move(state._replace(unit_s=tuple(unit_s), skipped=skipped))

  def speeds(self, state: RebalanceState) -> tuple[float, ...]:
    """Returns the units a second of each worker; 0 before it is measured."""
    return tuple(1 / statistics.median(t) if t else 0.0 for t in state.unit_s)

  def _move(self, state: RebalanceState) -> RebalanceState:
    known = self.speeds(state)
    if any(n and not v for n, v in zip(state.counts, known, strict=True)):
      return state
    # Nobody knows what a worker without work can do: it stays without.
    speeds = tuple(v or 1.0 for v in known)
    caps = self.caps or (self.total,) * self.workers
    caps = tuple(c if v else 0 for c, v in zip(caps, known, strict=True))
    counts = self._split(speeds, caps)
    now, then = (
      makespan_s(n, speeds, fixed_s=self.fixed_s)
      for n in (state.counts, counts)
    )
    if then > (1 - self.margin) * now:
      return state
    return state._replace(counts=counts, moves=state.moves + 1)

  def _split(
    self, speeds: Sequence[float], caps: tuple[int, ...] | None = None
  ) -> tuple[int, ...]:
    if len(speeds) != self.workers:
      raise ValueError(
        f"`speeds` must be {self.workers} numbers, got {tuple(speeds)}."
      )
    return integer_shares(
      self.total,
      speeds,
      fixed_s=self.fixed_s,
      caps=self.caps if caps is None else caps,
      least=self.least,
    )
