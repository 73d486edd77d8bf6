"""Predicted steps: of a platform that knows no step with an exchange."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping

import numpy as np

from experiments.perfmodel.cases import Case, work
from jaxmotion import perfmodel
from jaxmotion.perfmodel import Curve, Platform

_LEAST_S = 1e-6


class Alone:
  """Seconds of steps without exchange, by parameters and FLOPs.

  With `P` bytes of parameters and `F` FLOPs, `t = a(P) + b(P) F`: what the
  batch does not change, and what it does. Both are lines through steps of
  several batches, of least relative error, and grow between two widths as
  powers of `P`.

  Args:
    seconds: of steps without exchange, by case; two widths and two batches of
      each at least.
  """

  def __init__(self, seconds: Mapping[Case, float]):
    widths = sorted({case.width for case in seconds})
    lines = []
    for width in widths:
      points = sorted(
        (_flops(case), s) for case, s in seconds.items() if case.width == width
      )
      flops, times = zip(*points, strict=True)
      rising = tuple(np.maximum.accumulate(times).tolist())
      line = Curve(sizes=flops, seconds=rising, noise=0.0).fit_line()
      lines.append((max(line[0], _LEAST_S), max(line[1], _LEAST_S / flops[-1])))
    sizes = [_param_bytes(Case(width, 1, "none")) for width in widths]
    self._sizes, self._lines = np.log(sizes), np.log(lines)

  def seconds(self, case: Case) -> float:
    """Predicts the step of a case without its exchange."""
    size = math.log(_param_bytes(case))
    a, b = (
      math.exp(np.interp(size, self._sizes, column)) for column in self._lines.T
    )
    return a + b * _flops(case)


def _flops(case: Case) -> float:
  return work(case).gradient.flops


def _param_bytes(case: Case) -> int:
  widths = case.widths
  return 4 * sum(m * n + n for m, n in itertools.pairwise(widths))


def predict(platform: Platform, alone: Alone, case: Case) -> float:
  """Predicts the seconds of a step.

  Args:
    platform: calibrated with the same number of workers.
    alone: fitted to steps without exchange on the same testbed.
    case: any.
  """
  base_step_s = alone.seconds(case)
  if case.exchange == "none":
    return base_step_s
  step = perfmodel.predict_step(
    work(case),
    platform,
    "data",
    case.codec,
    overlap=False,
    base_step_s=base_step_s,
  )
  return step.total_s


def emulated_between(
  platforms: Mapping[int, Platform], workers: int
) -> Platform:
  """The platform of a number of emulated devices that was not calibrated.

  Devices share the cores and the memory of their machine: what all of them do
  together takes about as long as all of it one after the other. Curves of
  devices are interpolated in the logarithms of workers, and a collective takes
  as much longer than that of the next larger number as all wires together
  carry more bytes: exchanges between two workers take other ways than those
  between more.

  Args:
    platforms: by number of workers, a smaller and a larger one.
    workers: how many.
  """
  low, high, share = _between(platforms, workers)
  below, above = platforms[low].device, platforms[high].device
  measured = {
    name: _mix(below.measured[name], curve, share)
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
      f"{op} {workers}": _carry(curve, op, high, workers)
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


def _mix(below: Curve, above: Curve, share: float) -> Curve:
  sizes = sorted({*below.sizes, *above.sizes})
  seconds = [
    below.seconds_at(s) ** (1 - share) * above.seconds_at(s) ** share
    for s in sizes
  ]
  return Curve(
    sizes=tuple(sizes),
    seconds=tuple(np.maximum.accumulate(seconds).tolist()),
    noise=max(below.noise, above.noise),
  )


def _carry(curve: Curve, op: str, known: int, workers: int) -> Curve:
  there, here = (
    n * perfmodel.collective_traffic(op, 1.0, n).wire_bytes
    for n in (known, workers)
  )
  seconds = tuple(s * here / there for s in curve.seconds)
  return dataclasses.replace(curve, seconds=seconds)


def alone_between(
  seconds: Mapping[int, Mapping[Case, float]], workers: int
) -> Alone:
  """Steps without exchange of as many emulated devices, between two numbers.

  Args:
    seconds: of the same cases, by number of workers.
    workers: how many.
  """
  low, high, share = _between(seconds, workers)
  return Alone(
    {
      case: s ** (1 - share) * seconds[high][case] ** share
      for case, s in seconds[low].items()
    }
  )


def _between(known: Collection[int], workers: int) -> tuple[int, int, float]:
  """The numbers of workers around one, and its place between them."""
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
