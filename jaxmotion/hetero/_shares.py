"""How many units of work each worker gets.

A unit is whatever all workers can do one of: a microbatch, an example. Worker
i takes fixed_s_i + n_i / speed_i seconds for n_i units, and none for no units.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmotion.core import check_int

PerWorkerSeconds = float | Sequence[float]


def ideal_shares(
  total: int,
  speeds: Sequence[float],
  *,
  fixed_s: PerWorkerSeconds = 0.0,
  caps: Sequence[int] | None = None,
) -> tuple[float, ...]:
  r"""Splits work so that all who get some are done at the same time T.

  .. math::
    n_i = \min(\max(v_i (T - a_i), 0), cap_i), \quad \sum_i n_i = total

  With neither fixed times nor caps these are the shares of the speeds,
  n_i = total v_i / sum(v). No split into whole units takes less than T.

  Args:
    total: units in all.
    speeds: v, units a second of each worker.
    fixed_s: a, seconds that a worker takes besides, of each or of all.
    caps: most units that each worker has memory for; None is no limit.

  Returns:
    Units of each worker; they sum to `total`.

  Raises:
    TypeError, ValueError: an argument is none of these, or the caps cannot
      hold the total.

  Example:
    >>> ideal_shares(28, (1.0, 1.0, 1.0, 0.5))
    (8.0, 8.0, 8.0, 4.0)
    >>> ideal_shares(28, (1.0, 1.0, 1.0, 0.5), caps=(6, 28, 28, 28))
    (6.0, 8.8, 8.8, 4.4)
  """
  v, a, most = _check_work(total, speeds, fixed_s, caps)

  def units(t: np.ndarray) -> np.ndarray:
    return np.clip(v * (t[..., None] - a), 0, most)

  # Units done by t rise in straight lines between these times.
  bends = np.unique(np.concatenate([a, a + most / v]))
  done = units(bends).sum(axis=-1)
  # Rounding may leave the last a little short of what caps just hold.
  last = min(int(np.searchsorted(done, total)), len(bends) - 1)
  if last == 0:  # Nothing to do.
    return (0.0,) * len(v)
  part = (total - done[last - 1]) / (done[last] - done[last - 1])
  t = bends[last - 1] + part * (bends[last] - bends[last - 1])
  return tuple(units(t).tolist())


def integer_shares(
  total: int,
  speeds: Sequence[float],
  *,
  fixed_s: PerWorkerSeconds = 0.0,
  caps: Sequence[int] | None = None,
  least: int = 0,
) -> tuple[int, ...]:
  """Splits work into whole units so that the last worker is done soonest.

  One unit after the other goes to the worker that would be done with it first.
  The last of them is then the `total`-th of all times at which any worker can
  be done with a unit, and no split can do with earlier ones: this is the
  optimum, max_i fixed_s_i + n_i / speed_i over those with n_i > 0. Of workers
  that would be done at the same time the first gets the unit.

  Args:
    total: units in all.
    speeds: units a second of each worker.
    fixed_s: seconds that a worker takes besides, of each or of all.
    caps: most units that each worker has memory for; None is no limit.
    least: units that every worker gets, if its cap allows: the optimum is of
      those splits.

  Returns:
    Units of each worker; they sum to `total`.

  Raises:
    TypeError, ValueError: an argument is none of these, or the caps cannot
      hold the total, or it is less than `least` for every worker.

  Example:
    >>> integer_shares(27, (1.0, 1.0, 1.0, 0.5))
    (8, 8, 8, 3)
    >>> integer_shares(8, (1.0, 1.0, 1.0, 0.1), fixed_s=0.5)
    (3, 3, 2, 0)
  """
  v, a, most = _check_work(total, speeds, fixed_s, caps)
  check_int("least", least, 0)
  counts = [min(least, int(m)) for m in most]
  if sum(counts) > total:
    raise ValueError(
      f"`least` must be at most what {total} units allow {len(v)} workers, got"
      f" {least}."
    )

  def done_s(i: int) -> tuple[float, int]:
    """When a worker would be done with one more unit."""
    return float(a[i] + (counts[i] + 1) / v[i]), i

  queue = [done_s(i) for i in range(len(v)) if counts[i] < most[i]]
  heapq.heapify(queue)
  for _ in range(total - sum(counts)):
    _, i = heapq.heappop(queue)
    counts[i] += 1
    if counts[i] < most[i]:
      heapq.heappush(queue, done_s(i))
  return tuple(counts)


def makespan_s(
  counts: Sequence[float],
  speeds: Sequence[float],
  *,
  fixed_s: PerWorkerSeconds = 0.0,
) -> float:
  """Returns when the last worker is done, in seconds.

  Args:
    counts: units of each worker.
    speeds: units a second of each worker.
    fixed_s: seconds that a worker with work takes besides, of each or of all.

  Raises:
    ValueError: an argument is none of these.

  Example:
    >>> makespan_s((7, 7, 7, 7), (1.0, 1.0, 1.0, 0.5))
    14.0
  """
  v, a = _check_speeds(speeds, fixed_s)
  n = np.asarray(counts, np.float64)
  if n.shape != v.shape or not (np.isfinite(n) & (n >= 0)).all():
    raise ValueError(
      f"`counts` must be {len(v)} numbers of at least 0, got {counts}."
    )
  return float(np.max(np.where(n > 0, a + n / v, 0.0)))


def fit_speed(
  counts: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
  """Finds a worker's speed and fixed time from times it was measured at.

  Least squares of the relative errors of seconds = fixed_s + counts / speed,
  with fixed_s >= 0.

  Args:
    counts: units of each measurement; at least two that differ.
    seconds: what it took.

  Returns:
    speed (units a second) and fixed_s.

  Raises:
    ValueError: too few measurements, one that is not positive, or times that
      do not rise with the count.

  Example:
    >>> speed, fixed_s = fit_speed((1, 2, 4), (0.6, 1.1, 2.1))
    >>> round(speed, 6), round(fixed_s, 6)
    (2.0, 0.1)
  """
  n = np.asarray(counts, np.float64)
  t = np.asarray(seconds, np.float64)
  if n.ndim != 1 or n.shape != t.shape or len(np.unique(n)) < 2:
    raise ValueError(
      "`counts` must be at least two that differ, one for each of `seconds`,"
      f" got {counts} for {seconds}."
    )
  for name, values in (("counts", n), ("seconds", t)):
    if not (np.isfinite(values) & (values > 0)).all():
      raise ValueError(f"`{name}` must be positive, got {values.tolist()}.")
  ones = np.ones_like(t)
  (fixed_s, unit_s), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), ones)
  if fixed_s < 0:
    fixed_s, unit_s = 0.0, (n / t).sum() / (n / t * n / t).sum()
  if unit_s <= 0:
    raise ValueError(
      f"`seconds` must rise with `counts`, got {seconds} for {counts}."
    )
  return float(1 / unit_s), float(fixed_s)


def _check_work(
  total: int,
  speeds: Sequence[float],
  fixed_s: PerWorkerSeconds,
  caps: Sequence[int] | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns speeds, fixed times and caps; raises unless they can do it."""
  check_int("total", total, 0)
  v, a = _check_speeds(speeds, fixed_s)
  if caps is None:
    return v, a, np.full(len(v), float(total))
  most = np.asarray(caps)
  whole = np.issubdtype(most.dtype, np.integer)
  if most.shape != v.shape or not whole or (most < 0).any():
    raise ValueError(
      f"`caps` must be {len(v)} integers of at least 0, got {caps}."
    )
  if most.sum() < total:
    raise ValueError(
      f"`caps` must hold the {total} units of a step, got {caps}, which hold"
      f" {most.sum()}."
    )
  return v, a, most.astype(np.float64)


def _check_speeds(
  speeds: Sequence[float], fixed_s: PerWorkerSeconds
) -> tuple[np.ndarray, np.ndarray]:
  v = _numbers(speeds)
  if v.ndim != 1 or not v.size or not (np.isfinite(v) & (v > 0)).all():
    raise ValueError(
      "`speeds` must be positive, one for each worker (a worker that shall have"
      f" no work has a cap of 0), got {speeds}."
    )
  a = _numbers(fixed_s)
  if a.shape not in ((), v.shape) or not (np.isfinite(a) & (a >= 0)).all():
    raise ValueError(
      f"`fixed_s` must be seconds of at least 0, one or {len(v)} of them, got"
      f" {fixed_s}."
    )
  return v, np.broadcast_to(a, v.shape)


def _numbers(values: Any) -> np.ndarray:
  try:
    return np.asarray(values, np.float64)
  except (TypeError, ValueError):
    return np.asarray(math.nan)
