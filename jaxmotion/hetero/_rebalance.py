"""Controller that moves microbatches to faster workers during training."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmotion import core
from jaxmotion.hetero import _shares


class RebalanceState(NamedTuple):
  """State of `rebalance`: plain Python numbers, the same on every process.

  Attributes:
    counts: microbatches of each worker in the next step.
    microbatch_s: last measured seconds of a microbatch for each worker, the
      newest last.
    changes: number of times that the counts have changed.
    skipped: number of measurements that were not valid times.

  Example:
    >>> from jaxmotion import hetero
    >>> balance = hetero.rebalance(total=8, workers=2)
    >>> state = balance.update((0.1, 0.3), balance.init())
    >>> state.microbatch_s, state.skipped
    (((0.025,), (0.075,)), 0)
  """

  counts: tuple[int, ...]
  microbatch_s: tuple[tuple[float, ...], ...]
  changes: int
  skipped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  workers=core.integer(1, 1 << 20),
  total=core.integer(1, 1 << 30),
  min_gain=core.number(0, 1, open_low=True),
  window=core.integer(1, 1 << 20),
)
class rebalance:
  """Moves work from slow workers to fast ones when that shortens the step.

  A worker's speed is that of its median time for a microbatch over the last
  `window` measurements: one slow step changes nothing. Let n be the counts, n*
  those of `integer_shares` at these speeds, and T the time of the last worker:

    n <- n* if T(n*) <= (1 - min_gain) T(n)

  Noise therefore does not move work to and fro: a change has to pay. The first
  change waits until every worker with work was measured. A change of speed is
  acted on after `window // 2 + 1` measurements.

  It runs on the host. Every process must be given the same times, of all
  workers: the metrics of a step carry them to everyone.

  Args:
    total: microbatches in a step; every split has this sum.
    workers: number of workers.
    caps: largest number of microbatches that each worker has memory for; None
      is no limit.
    fixed_s: seconds that a worker takes besides its microbatches, one number
      or one for each worker.
    min_microbatches: microbatches that every worker keeps, if its cap allows.
      A worker without work is not measured, so its recovery would go
      unnoticed.
    min_gain: smallest gain worth a change, as a fraction of the step's time.
    window: number of last measurements of each worker that count.

  Raises:
    TypeError, ValueError: an argument outside its range.

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
    distributed learning in non-dedicated environments*, 2020. They resize
    batches by predicted speeds in the same way.
  """

  total: int
  workers: int
  caps: tuple[int, ...] | None = None
  fixed_s: float | tuple[float, ...] = 0.0
  min_microbatches: int = 1
  min_gain: float = 0.05
  window: int = 5

  def __post_init__(self) -> None:
    # Raises if caps, fixed times or the minimum do not allow any split.
    self._split_work((1.0,) * self.workers)

  def init(self, speeds: Sequence[float] | None = None) -> RebalanceState:
    """Returns the state before the first measurement.

    Args:
      speeds: microbatches per second of each worker, if known; otherwise all
        workers start with equal shares.
    """
    known = (1.0,) * self.workers if speeds is None else speeds
    if _shares.as_numbers(known, float).shape != (self.workers,):
      raise ValueError(
        f"`speeds` must be {self.workers} numbers, got {speeds!r}."
      )
    return RebalanceState(self._split_work(known), ((),) * self.workers, 0, 0)

  def update(
    self, seconds: Sequence[float], state: RebalanceState
  ) -> RebalanceState:
    """Returns the state after a step that took these times.

    Args:
      seconds: seconds of each worker for its own work in the step, without
        waiting for others. The time of a worker without work is ignored; a
        time that is not finite, or not above `fixed_s`, is skipped.
      state: what `init` or the last `update` returned; it had the counts.

    Raises:
      ValueError: `seconds` has another length than `workers`.
    """
    elapsed_s = _shares.as_numbers(seconds, float)
    if elapsed_s.shape != (self.workers,):
      raise ValueError(
        f"`seconds` must be {self.workers} times, got {seconds!r}."
      )
    self._check_state(state)
    microbatch_s, skipped = list(state.microbatch_s), state.skipped
    fixed_s = np.broadcast_to(self.fixed_s, self.workers).tolist()
    for i, (n, s) in enumerate(zip(state.counts, elapsed_s, strict=True)):
      elapsed = float(s) - fixed_s[i]
      if n and math.isfinite(elapsed) and elapsed > 0:
        microbatch_s[i] = (*microbatch_s[i], elapsed / n)[-self.window :]
      elif n:
        skipped += 1
    return self._change_counts(
      state._replace(microbatch_s=tuple(microbatch_s), skipped=skipped)
    )

  def speeds(self, state: RebalanceState) -> tuple[float, ...]:
    """Returns each worker's microbatches per second; 0 before it is measured.

    Args:
      state: what `init` or `update` returned.
    """
    self._check_state(state)
    return tuple(
      1 / statistics.median(t) if t else 0.0 for t in state.microbatch_s
    )

  def _check_state(self, state: RebalanceState) -> None:
    """Raises unless a state is one of as many workers."""
    source = "what `init` or the last `update` returned"
    core.instance(RebalanceState, source)("state", state)
    for field in (state.counts, state.microbatch_s):
      if not isinstance(field, tuple) or len(field) != self.workers:
        raise ValueError(f"`state` must be {source}, got {state!r:.300}.")

  def _change_counts(self, state: RebalanceState) -> RebalanceState:
    """Returns the state with the best counts, if they gain enough."""
    known = self.speeds(state)
    if any(n and not v for n, v in zip(state.counts, known, strict=True)):
      return state
    # The speed of a worker without work is unknown: its cap becomes 0.
    speeds = tuple(v or 1.0 for v in known)
    most = self.caps or (self.total,) * self.workers
    caps = tuple(c if v else 0 for c, v in zip(most, known, strict=True))
    counts = self._split_work(speeds, caps)
    old_s, new_s = (
      _shares.makespan_s(n, speeds, fixed_s=self.fixed_s)
      for n in (state.counts, counts)
    )
    if new_s > (1 - self.min_gain) * old_s:
      return state
    return state._replace(counts=counts, changes=state.changes + 1)

  def _split_work(
    self, speeds: Sequence[float], caps: tuple[int, ...] | None = None
  ) -> tuple[int, ...]:
    """Returns the best counts at these speeds, within `caps` or `self.caps`."""
    return _shares.integer_shares(
      self.total,
      speeds,
      fixed_s=self.fixed_s,
      caps=self.caps if caps is None else caps,
      min_microbatches=self.min_microbatches,
    )
