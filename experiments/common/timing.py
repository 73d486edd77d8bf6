"""Times what runs on a device, call after call."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.core import PyTree

# Calls are repeated back to back until they take about this long.
_REPEAT_MS = 4.0
_MOST_CALLS = 100


class TimedCalls(Protocol):
  """Runs a number of calls back to back and returns when all are done."""

  def __call__(self, calls: int) -> None:
    """Runs that many."""


class Times(NamedTuple):
  """Milliseconds of one call, in each of several interleaved repeats."""

  ms: dict[str, list[float]]

  def median(self, case: str) -> float:
    """Median time of a case, ms."""
    return statistics.median(self.ms[case])

  def ratio(self, case: str, baseline: str) -> tuple[float, float]:
    """Baseline time over a case's: its median and standard deviation."""
    ratios = [
      b / t for t, b in zip(self.ms[case], self.ms[baseline], strict=True)
    ]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return statistics.median(ratios), spread


def measure_times(cases: Mapping[str, TimedCalls], repeats: int) -> Times:
  """Times all cases in turn, `repeats` times.

  Short calls are repeated back to back, so that starting the first and waiting
  for the last is not what is measured.
  """
  calls = {case: _count_calls(timed) for case, timed in cases.items()}
  ms: dict[str, list[float]] = {case: [] for case in cases}
  for _ in range(repeats):
    for case, timed in cases.items():
      ms[case].append(_time_calls(timed, calls[case]) / calls[case])
  return Times(ms)


def _count_calls(timed: TimedCalls) -> int:
  _time_calls(timed, 1)
  return min(_MOST_CALLS, math.ceil(_REPEAT_MS / _time_calls(timed, 1)))


def _time_calls(timed: TimedCalls, calls: int) -> float:
  begin = time.perf_counter()
  timed(calls)
  return 1e3 * (time.perf_counter() - begin)


class InPlace:
  """A function whose outputs go where its last ones were.

  As they do in a training loop: no call waits for memory, however many are
  under way, and on a host no page is touched for the first time.

  Args:
    fn: (outputs of the last call, *args) -> outputs; donates the first.
    outputs: their shapes and dtypes.
    args: what it is called with each time.
  """

  def __init__(
    self, fn: Callable[..., PyTree], outputs: PyTree, args: tuple[PyTree, ...]
  ):
    self._fn = fn
    self._args = args
    self._last = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), outputs)

  def __call__(self, calls: int) -> None:
    """Runs that many calls and waits for the last."""
    for _ in range(calls):
      self._last = self._fn(self._last, *self._args)
    jax.block_until_ready(self._last)


def make_copy(size_bytes: int) -> TimedCalls:
  """A copy that reads half of these bytes and writes the other half.

  On a host it is numpy's, between buffers that exist.
  """
  some = np.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32)
  size = max(1, size_bytes // 8)
  if jax.default_backend() != "cpu":
    x = jnp.resize(some, (size,))
    copy = lambda last, x: jnp.copy(x)
    return InPlace(jax.jit(copy, donate_argnums=0, keep_unused=True), x, (x,))
  source = np.resize(some, size)
  target = np.empty_like(source)

  def run(calls: int) -> None:
    for _ in range(calls):
      np.copyto(target, source)

  return run
