"""Times of calls that run back to back on a device."""

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
_MAX_CALLS = 100


class TimedCalls(Protocol):
  """Function that runs calls back to back and waits for the last."""

  def __call__(self, calls: int) -> None:
    """Runs that many calls."""


class Times(NamedTuple):
  """Milliseconds of one call of each case, in interleaved repeats."""

  ms: dict[str, list[float]]

  def median(self, case: str) -> float:
    """Returns the median time of a case, milliseconds."""
    return statistics.median(self.ms[case])

  def ratio(self, case: str, baseline: str) -> tuple[float, float]:
    """Returns median and standard deviation of baseline time over case time."""
    ratios = [
      b / t for t, b in zip(self.ms[case], self.ms[baseline], strict=True)
    ]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return statistics.median(ratios), spread


def measure_times(cases: Mapping[str, TimedCalls], repeats: int) -> Times:
  """Times all cases in turns, `repeats` times."""
  # Short calls are repeated back to back, so that starting the first call and
  # waiting for the last one does not dominate the time.
  calls = {case: _count_calls(timed) for case, timed in cases.items()}
  ms: dict[str, list[float]] = {case: [] for case in cases}
  for _ in range(repeats):
    for case, timed in cases.items():
      ms[case].append(_time_calls(timed, calls[case]) / calls[case])
  return Times(ms)


def _count_calls(timed: TimedCalls) -> int:
  _time_calls(timed, 1)
  return min(_MAX_CALLS, math.ceil(_REPEAT_MS / _time_calls(timed, 1)))


def _time_calls(timed: TimedCalls, calls: int) -> float:
  begin = time.perf_counter()
  timed(calls)
  return 1e3 * (time.perf_counter() - begin)


class InPlace:
  """Calls of a function whose outputs overwrite those of its last call.

  Outputs are overwritten as in a training loop: no call waits for memory,
  however many are under way, and on a host no page is touched for the first
  time.
  """

  def __init__(
    self,
    fn: Callable[..., PyTree],
    outputs: PyTree,
    args: tuple[PyTree, ...],
    in_flight: int | None = None,
  ):
    # `fn`: (outputs of the last call, *args) -> outputs; donates the first.
    # `in_flight`: calls to start before the oldest has to end, None for all.
    # Emulated devices need a limit: see docs/lessons.md.
    self._fn = fn
    self._args = args
    self._in_flight = in_flight
    self._last = jax.tree.map(_make_zeros, outputs)

  def __call__(self, calls: int) -> None:
    """Runs that many calls and waits for the last."""
    for i in range(1, calls + 1):
      self._last = self._fn(self._last, *self._args)
      if i == calls or (self._in_flight and i % self._in_flight == 0):
        jax.block_until_ready(self._last)


def _make_zeros(like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
  is_array = isinstance(like, jax.Array)
  return jnp.zeros(
    like.shape, like.dtype, device=None if is_array else like.sharding
  )


def make_copy(size_bytes: int) -> TimedCalls:
  """Returns a copy that reads half of the bytes and writes the other half."""
  # On a host, numpy copies between existing buffers.
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
