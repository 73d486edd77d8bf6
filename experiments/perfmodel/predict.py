"""Predicted steps from a platform and from steps without exchange."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping

import numpy as np

from experiments.perfmodel import cases
from jaxmotion import perfmodel

_LEAST_S = 1e-6


class BaseStepModel:
  """Seconds of a step without exchange, from its parameters and FLOPs.

  With `P` bytes of parameters and `F` FLOPs, `t = a(P) + b(P) F`. For each
  width, `a` and `b` are the line of least relative error through steps of
  several batches. Between two widths they grow as powers of `P`. At least two
  widths are known, with at least two batches each.
  """

  def __init__(self, seconds: Mapping[cases.Case, float]):
    widths = sorted({case.width for case in seconds})
    lines = []
    for width in widths:
      points = sorted(
        (_count_flops(case), s)
        for case, s in seconds.items()
        if case.width == width
      )
      flops, times = zip(*points, strict=True)
      rising = tuple(np.maximum.accumulate(times).tolist())
      line = perfmodel.Curve(sizes=flops, seconds=rising, noise=0.0).fit_line()
      lines.append((max(line[0], _LEAST_S), max(line[1], _LEAST_S / flops[-1])))
    sizes = [_param_bytes(cases.Case(width, 1, "none")) for width in widths]
    self._sizes, self._lines = np.log(sizes), np.log(lines)

  def predict_seconds(self, case: cases.Case) -> float:
    """Returns the seconds of a case's step without its exchange."""
    size = math.log(_param_bytes(case))
    a, b = (
      math.exp(np.interp(size, self._sizes, column)) for column in self._lines.T
    )
    return a + b * _count_flops(case)


def _count_flops(case: cases.Case) -> float:
  return cases.trace_case(case).gradient.flops


def _param_bytes(case: cases.Case) -> int:
  widths = case.widths
  return 4 * sum(m * n + n for m, n in itertools.pairwise(widths))


def predict_case(
  platform: perfmodel.Platform, base_step: BaseStepModel, case: cases.Case
) -> float:
  """Returns the predicted seconds of a step."""
  base_step_s = base_step.predict_seconds(case)
  if case.exchange == "none":
    return base_step_s
  step = perfmodel.predict_step(
    cases.trace_case(case),
    platform,
    "data",
    case.codec,
    overlap=False,
    base_step_s=base_step_s,
  )
  return step.total_s


def interpolate_platform(
  platforms: Mapping[int, perfmodel.Platform], workers: int
) -> perfmodel.Platform:
  """Returns the platform of a number of emulated devices between two others."""
  # Devices share the cores and the memory of their machine: the work of all
  # devices takes about as long as all of it in sequence. Curves of devices are
  # interpolated in the logarithm of workers. A collective scales from the next
  # larger number of workers by the bytes on all wires together. The smaller
  # number is not used: two workers exchange in other ways than more do.
  low, high, share = _find_neighbors(platforms, workers)
  below, above = platforms[low].device, platforms[high].device
  measured = {
    name: _interpolate_curve(below.measured[name], curve, share)
    for name, curve in above.measured.items()
  }
  device = dataclasses.replace(
    above,
    measured=measured,
    call_s=below.call_s ** (1 - share) * above.call_s**share,
  )
  (axis,) = platforms[high].axes
  link = dataclasses.replace(
    axis.link,
    measured={
      f"{op} {workers}": _scale_collective(curve, op, high, workers)
      for op, curve in (
        (name.split()[0], curve) for name, curve in axis.link.measured.items()
      )
    },
  )
  axis = dataclasses.replace(axis, workers=workers, link=link)
  name = f"{platforms[high].name}, as if it had {workers}"
  return dataclasses.replace(
    platforms[high], name=name, device=device, axes=(axis,), sources={}
  )


def _interpolate_curve(
  below: perfmodel.Curve, above: perfmodel.Curve, share: float
) -> perfmodel.Curve:
  """Returns the geometric mean of two curves, weighted by `share`."""
  sizes = sorted({*below.sizes, *above.sizes})
  seconds = [
    below.seconds_at(s) ** (1 - share) * above.seconds_at(s) ** share
    for s in sizes
  ]
  return perfmodel.Curve(
    sizes=tuple(sizes),
    seconds=tuple(np.maximum.accumulate(seconds).tolist()),
    noise=max(below.noise, above.noise),
  )


def _scale_collective(
  curve: perfmodel.Curve, op: str, known: int, workers: int
) -> perfmodel.Curve:
  """Scales a curve by the bytes on all wires of both numbers of workers."""
  there, here = (
    n * perfmodel.collective_traffic(op, 1.0, n).wire_bytes
    for n in (known, workers)
  )
  seconds = tuple(s * here / there for s in curve.seconds)
  return dataclasses.replace(curve, seconds=seconds)


def interpolate_base_step(
  seconds: Mapping[int, Mapping[cases.Case, float]], workers: int
) -> BaseStepModel:
  """Returns the base step of a number of devices between two others."""
  # `seconds`: seconds of the same cases by number of workers.
  low, high, share = _find_neighbors(seconds, workers)
  return BaseStepModel(
    {
      case: s ** (1 - share) * seconds[high][case] ** share
      for case, s in seconds[low].items()
    }
  )


def _find_neighbors(
  known: Collection[int], workers: int
) -> tuple[int, int, float]:
  """Returns the nearest numbers below and above, and the position between."""
  below, above = [
    [n for n in known if sign * (n - workers) > 0] for sign in (-1, 1)
  ]
  if not below or not above:
    raise ValueError(
      "`workers` must lie between numbers that were calibrated, "
      f"{sorted(known)}, got {workers}."
    )
  low, high = max(below), min(above)
  return low, high, math.log(workers / low) / math.log(high / low)
