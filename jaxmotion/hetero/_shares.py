"""Shares of work for workers of unequal speed.

Work is counted in microbatches; any other equal pieces of work will do. Worker
i takes fixed_s_i + n_i / speed_i seconds for n_i of them, and none for n_i = 0.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmotion import core
from jaxmotion.core import PyTree

PerWorkerSeconds = float | Sequence[float]


@core.declare(total=core.integer(0))
def ideal_shares(
  total: int,
  speeds: Sequence[float],
  *,
  fixed_s: PerWorkerSeconds = 0.0,
  caps: Sequence[int] | None = None,
) -> tuple[float, ...]:
  r"""Splits work into fractional shares that all end at the same time T.

  .. math::
    n_i = \min(\max(v_i (T - a_i), 0), cap_i), \quad \sum_i n_i = total

  With neither fixed times nor caps the shares are proportional to the speeds,
  n_i = total v_i / sum(v). No split into whole microbatches ends before T.

  Args:
    total: microbatches in all.
    speeds: v, microbatches per second of each worker.
    fixed_s: a, seconds that a worker takes besides its microbatches, one
      number or one for each worker.
    caps: largest number of microbatches that each worker has memory for; None
      is no limit.

  Returns:
    Microbatches of each worker, fractions; they sum to `total`.

  Raises:
    TypeError, ValueError: an argument outside its range, or caps whose sum is
      less than the total.

  Example:
    >>> ideal_shares(28, (1.0, 1.0, 1.0, 0.5))
    (8.0, 8.0, 8.0, 4.0)
    >>> ideal_shares(28, (1.0, 1.0, 1.0, 0.5), caps=(6, 28, 28, 28))
    (6.0, 8.8, 8.8, 4.4)
  """
  v, a, cap = _check_work(total, speeds, fixed_s, caps)

  def shares_by(t: np.ndarray) -> np.ndarray:
    return np.clip(v * (t[..., None] - a), 0, cap)

  # The work done by time t is piecewise linear: it bends where a worker starts
  # or reaches its cap. So find the segment that holds the total, and
  # interpolate.
  bends = np.unique(np.concatenate([a, a + cap / v]))
  done = shares_by(bends).sum(axis=-1)
  # Rounding may leave the last sum slightly below caps that just hold the
  # total.
  last = min(int(np.searchsorted(done, total)), len(bends) - 1)
  if last == 0:  # The total is zero.
    return (0.0,) * len(v)
  fraction = (total - done[last - 1]) / (done[last] - done[last - 1])
  t = bends[last - 1] + fraction * (bends[last] - bends[last - 1])
  return tuple(shares_by(t).tolist())


@core.declare(total=core.integer(0), min_microbatches=core.integer(0))
def integer_shares(
  total: int,
  speeds: Sequence[float],
  *,
  fixed_s: PerWorkerSeconds = 0.0,
  caps: Sequence[int] | None = None,
  min_microbatches: int = 0,
) -> tuple[int, ...]:
  """Splits work into whole microbatches with the smallest makespan.

  Each microbatch in turn goes to the worker that would finish it first. The
  last one then ends at the `total`-th of all times at which any worker can
  finish a microbatch, and no split ends earlier. So the result is the optimum
  of max_i fixed_s_i + n_i / speed_i over the workers with n_i > 0. Ties go to
  the first worker.

  Args:
    total: microbatches in all.
    speeds: microbatches per second of each worker.
    fixed_s: seconds that a worker takes besides its microbatches, one number
      or one for each worker.
    caps: largest number of microbatches that each worker has memory for; None
      is no limit.
    min_microbatches: microbatches that every worker gets, if its cap allows;
      the result is the optimum of such splits.

  Returns:
    Microbatches of each worker; they sum to `total`.

  Raises:
    TypeError, ValueError: an argument outside its range, caps whose sum is
      less than the total, or a total of less than `min_microbatches` for every
      worker.

  Example:
    >>> integer_shares(27, (1.0, 1.0, 1.0, 0.5))
    (8, 8, 8, 3)
    >>> integer_shares(8, (1.0, 1.0, 1.0, 0.1), fixed_s=0.5)
    (3, 3, 2, 0)
  """
  v, a, cap = _check_work(total, speeds, fixed_s, caps)
  counts = [min(min_microbatches, int(c)) for c in cap]
  if sum(counts) > total:
    raise ValueError(
      f"`min_microbatches` must be at most what {total} microbatches allow"
      f" {len(v)} workers, got {min_microbatches}."
    )

  def finish_s(i: int) -> tuple[float, int]:
    """Returns when worker i would finish one more microbatch, and i."""
    return float(a[i] + (counts[i] + 1) / v[i]), i

  queue = [finish_s(i) for i in range(len(v)) if counts[i] < cap[i]]
  heapq.heapify(queue)
  for _ in range(total - sum(counts)):
    _, i = heapq.heappop(queue)
    counts[i] += 1
    if counts[i] < cap[i]:
      heapq.heappush(queue, finish_s(i))
  return tuple(counts)


def makespan_s(
  counts: Sequence[float],
  speeds: Sequence[float],
  *,
  fixed_s: PerWorkerSeconds = 0.0,
) -> float:
  """Returns the seconds until the last worker has finished its share.

  Args:
    counts: microbatches of each worker.
    speeds: microbatches per second of each worker.
    fixed_s: seconds that a worker with work takes besides its microbatches,
      one number or one for each worker.

  Raises:
    ValueError: an argument outside its range.

  Example:
    >>> makespan_s((7, 7, 7, 7), (1.0, 1.0, 1.0, 0.5))
    14.0
  """
  v, a = _check_speeds(speeds, fixed_s)
  n = as_numbers(counts, float)
  if n.shape != v.shape or not (np.isfinite(n) & (n >= 0)).all():
    raise ValueError(
      f"`counts` must be {len(v)} numbers of at least 0, got {counts}."
    )
  return float(np.max(np.where(n > 0, a + n / v, 0.0)))


def fit_speed(
  counts: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
  """Fits a worker's speed and fixed time to measured times.

  It minimizes the squares of the relative errors of
  seconds = fixed_s + counts / speed, with fixed_s >= 0.

  Args:
    counts: microbatches of each measurement; at least two that differ.
    seconds: measured seconds of each measurement.

  Returns:
    speed (microbatches per second) and fixed_s (seconds).

  Raises:
    ValueError: too few measurements, one that is not positive, or times that
      do not rise with the count.

  Example:
    >>> speed, fixed_s = fit_speed((1, 2, 4), (0.6, 1.1, 2.1))
    >>> round(speed, 6), round(fixed_s, 6)
    (2.0, 0.1)
  """
  n, t = as_numbers(counts, float), as_numbers(seconds, float)
  if n.ndim != 1 or n.shape != t.shape or len(np.unique(n)) < 2:
    raise ValueError(
      "`counts` must be at least two that differ, one for each of `seconds`,"
      f" got {counts} for {seconds}."
    )
  for name, values in (("counts", n), ("seconds", t)):
    if not (np.isfinite(values) & (values > 0)).all():
      raise ValueError(f"`{name}` must be positive, got {values.tolist()}.")
  ones = np.ones_like(t)
  coefficients, *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), ones)
  fixed_s, microbatch_s = coefficients
  if fixed_s < 0:
    fixed_s, microbatch_s = 0.0, (n / t).sum() / (n / t * n / t).sum()
  if microbatch_s <= 0:
    raise ValueError(
      f"`seconds` must rise with `counts`, got {t.tolist()} for {n.tolist()}."
    )
  return float(1 / microbatch_s), float(fixed_s)


@core.declare(
  microbatch=core.integer(1, 2**31 - 1),
  batch=core.arrays,
  max_microbatches=core.integer(1, 2**31 - 1),
)
def assign_microbatches(
  batch: PyTree,
  counts: Sequence[int],
  *,
  microbatch: int,
  max_microbatches: int,
) -> tuple[PyTree, np.ndarray]:
  """Assigns the examples of a batch to workers, in whole microbatches.

  The order is kept: worker 0 gets the first counts[0] microbatches. Every
  worker's part has room for `max_microbatches`, so no shape depends on the
  counts. The result is a batch for `step(state, batch, counts=counts)` of
  `make_train_step(..., microbatches=max_microbatches)`.

  Args:
    batch: pytree of host arrays of shape (examples, ...).
    counts: int[workers], microbatches of each worker. They sum to the number
      of microbatches that the examples fill; the last one may be partly full.
    microbatch: number of examples in a microbatch.
    max_microbatches: largest count that any worker will ever have.

  Returns:
    The batch as (workers * max_microbatches * microbatch, ...), padded with
    zeros, and the mask of its examples, bool of the leading axis.

  Raises:
    TypeError, ValueError: counts that are no integers, exceed
      `max_microbatches`, or do not sum to the batch; leaves of different
      lengths.

  Example:
    >>> x, valid = assign_microbatches(
    ...   np.arange(5), (0, 2, 1), microbatch=2, max_microbatches=2
    ... )
    >>> x.reshape(3, 4).tolist()  # One row for each worker.
    [[0, 0, 0, 0], [0, 1, 2, 3], [4, 0, 0, 0]]
    >>> valid.reshape(3, 4).sum(axis=1).tolist()
    [0, 4, 1]
  """
  lengths = {np.shape(a)[:1] for a in jax.tree.leaves(batch)}
  if len(lengths) != 1 or () in lengths:
    raise ValueError(
      "`batch` must have leaves of one length along their leading axis, got"
      f" {sorted(lengths)}."
    )
  ((examples,),) = lengths
  count = as_numbers(counts, int)
  if count.ndim != 1 or (count < 0).any() or (count > max_microbatches).any():
    raise ValueError(
      f"`counts` must be integers in [0, {max_microbatches}], got {counts}."
    )
  needed = -(-examples // microbatch)
  if count.sum() != needed:
    raise ValueError(
      f"`counts` must sum to the {needed} microbatches of {examples} examples,"
      f" got {list(counts)}, which sum to {count.sum()}."
    )
  is_assigned = np.arange(max_microbatches) < count[:, None]

  def assign_leaf(a: np.ndarray) -> np.ndarray:
    """Returns an array's examples at the places of their workers."""
    a = np.asarray(a)
    padded = np.zeros((needed * microbatch, *a.shape[1:]), a.dtype)
    padded[:examples] = a
    shape = (len(count), max_microbatches, microbatch, *a.shape[1:])
    assigned = np.zeros(shape, a.dtype)
    assigned[is_assigned] = padded.reshape(needed, microbatch, *a.shape[1:])
    return assigned.reshape(-1, *a.shape[1:])

  return jax.tree.map(assign_leaf, batch), assign_leaf(np.ones(examples, bool))


def _check_work(
  total: int,
  speeds: Sequence[float],
  fixed_s: PerWorkerSeconds,
  caps: Sequence[int] | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns speeds, fixed times and caps as float64[workers], checked."""
  v, a = _check_speeds(speeds, fixed_s)
  if caps is None:
    return v, a, np.full(len(v), float(total))
  cap = as_numbers(caps, int)
  if cap.shape != v.shape or (cap < 0).any():
    raise ValueError(
      f"`caps` must be {len(v)} integers of at least 0, got {caps}."
    )
  if cap.sum() < total:
    raise ValueError(
      f"`caps` must hold the {total} microbatches of a step, got {caps}, which"
      f" hold {cap.sum()}."
    )
  return v, a, cap.astype(np.float64)


def _check_speeds(
  speeds: Sequence[float], fixed_s: PerWorkerSeconds
) -> tuple[np.ndarray, np.ndarray]:
  """Returns speeds and fixed times as float64[workers], checked."""
  v = as_numbers(speeds, float)
  if v.ndim != 1 or not v.size or not (np.isfinite(v) & (v > 0)).all():
    raise ValueError(
      "`speeds` must be positive, one for each worker (give a worker without"
      f" work a cap of 0), got {speeds}."
    )
  a = as_numbers(fixed_s, float)
  if a.shape not in ((), v.shape) or not (np.isfinite(a) & (a >= 0)).all():
    raise ValueError(
      f"`fixed_s` must be seconds of at least 0, one or {len(v)} of them, got"
      f" {fixed_s}."
    )
  return v, np.broadcast_to(a, v.shape)


def as_numbers(values: Any, dtype: type) -> np.ndarray:
  """Returns numbers as an array, or -1 (which no check passes) for others."""
  # Floats may be given as integers, but integers not as floats.
  try:
    array = np.asarray(values)
    if array.dtype != bool and (dtype is float or array.dtype.kind in "iu"):
      return array.astype(dtype)
  except (OverflowError, TypeError, ValueError):
    pass
  return np.asarray(-1, dtype)
