"""Times probes again and again, and makes curves of seconds over size."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmotion import perfmodel
from jaxmotion.calibration import _probes

_LEAST_S = 1e-7


class ProbeTimer:
  """Times all probes once per round, so that slow minutes fall on all alike.

  Args:
    mesh: devices that work at once.
    probes: operations to time.
    barrier: waits for other processes that measure too.
  """

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    probes: Sequence[_probes.Probe],
    barrier: Callable[[], object] = lambda: None,
  ):
    self._probes, self._barrier = probes, barrier
    self._empty = _probes.compile_everywhere(
      mesh, lambda x: x + 1, _probes.random_floats(1)
    )
    self._times: list[list[float]] = []
    self._time_all()

  def run_round(self) -> None:
    """Times every probe once; the round at construction is not counted."""
    self._times.append(self._time_all())

  def _time_all(self) -> list[float]:
    seconds = []
    for run in (self._empty, *(probe.run for probe in self._probes)):
      self._barrier()
      begin = time.perf_counter()
      run()
      seconds.append(time.perf_counter() - begin)
    return seconds

  def make_curves(self) -> tuple[float, dict[str, perfmodel.Curve]]:
    """Returns the seconds of calling an empty program, and all curves.

    The time of an empty program is subtracted from every size. Sizes whose
    remainder lies within the noise are left out, except for the largest.
    """
    times = np.array(self._times)
    call_s, call_noise_s = robust_seconds(times[:, 0])
    points: dict[str, list[Point]] = {}
    for probe, column in zip(self._probes, times.T[1:], strict=True):
      second, spread = robust_seconds(column)
      point = Point(probe.size, second - call_s, spread / second)
      points.setdefault(probe.curve, []).append(point)
    curves = {k: make_curve(v, call_noise_s) for k, v in points.items()}
    return call_s, subtract_updates(curves, call_noise_s)


class Point(NamedTuple):
  """Size, seconds and relative noise of one probe."""

  size: float
  seconds: float
  noise: float


def robust_seconds(times: np.ndarray) -> tuple[float, float]:
  """Returns the time of an operation on a machine that others use as well.

  Other processes only add to a time, so the lower quartile is taken. On an idle
  machine the lower quartile is the median up to the noise.

  Args:
    times: seconds of the repeats.

  Returns:
    The lower quartile, and half of the spread (10th to 90th percentile).
  """
  low, second, high = np.percentile(times, (10, 25, 90))
  return float(second), float(high - low) / 2


def make_curve(points: list[Point], least_s: float) -> perfmodel.Curve:
  """Returns the curve through points, without points within the noise."""
  # `least_s`: seconds of noise; smaller sizes that take no more are left out.
  *smaller, largest = sorted(points)
  kept = [point for point in smaller if point.seconds > least_s]
  sizes, seconds, noise = zip(*kept, largest, strict=True)
  return perfmodel.Curve(
    sizes=tuple(map(float, sizes)),
    seconds=tuple(_pool_violators(np.maximum(seconds, _LEAST_S))),
    noise=statistics.median(noise),
  )


def _pool_violators(seconds: Iterable[float]) -> list[float]:
  """Returns the nearest non-decreasing sequence (pool adjacent violators)."""
  pools: list[tuple[float, int]] = []
  for second in seconds:
    mean, count = float(second), 1
    while pools and pools[-1][0] > mean:
      before, more = pools.pop()
      mean = (before * more + mean * count) / (more + count)
      count += more
    pools.append((mean, count))
  return [mean for mean, count in pools for _ in range(count)]


def subtract_updates(
  curves: dict[str, perfmodel.Curve], least_s: float
) -> dict[str, perfmodel.Curve]:
  """Replaces curves of whole updates by those of decoding and of adding."""
  # Decoding is an update by one payload less a plain update. Adding is an
  # update by two payloads less that by one.
  # `least_s`: seconds of noise.
  found = {
    k: c for k, c in curves.items() if k.split()[0] not in _probes.UPDATES
  }
  for name, one in curves.items():
    what, _, codec = name.partition(" ")
    if what == "one":
      two = curves[f"two {codec}"]
      found[f"decode {codec}"] = _subtract_curve(one, curves["update"], least_s)
      found[f"add {codec}"] = _subtract_curve(two, one, least_s)
  return found


def _subtract_curve(
  whole: perfmodel.Curve, part: perfmodel.Curve, least_s: float
) -> perfmodel.Curve:
  points = [
    Point(size, seconds - part.seconds_at(size), whole.noise)
    for size, seconds in zip(whole.sizes, whole.seconds, strict=True)
  ]
  return make_curve(points, least_s)
