"""Calibration: times probes on this machine and makes a platform of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmotion import core, perfmodel
from jaxmotion.calibration import _fit_platform, _probes, _timer
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import check_codec


def calibrate_platform(
  name: str = "here",
  *,
  axis: str = "data",
  workers: int | None = None,
  codecs: Sequence[Codec] = (),
  largest: int = 1 << 23,
  sizes: int = 8,
  repeats: int = 20,
  report: Callable[[int], Any] | None = None,
) -> perfmodel.Platform:
  """Times operations on this machine and returns a platform that fits them.

  It times matmuls, convolutions, elementwise passes, reductions, copies to the
  device, codecs and collectives, each at sizes equally far apart in their
  logarithms. All devices work at once, as they do in a step. Sizes alternate,
  so that a slow minute of the machine falls on all alike. A size takes the
  lower quartile of its repeats (other processes only add to it), less the time
  of calling an empty program. The platform keeps the measurements, beside the
  line of least relative error through them, which gives rates and latencies.

  Args:
    name: name of the platform.
    axis: name of the axis of devices.
    workers: number of devices that work at once; None: all. A platform of one
      has no axis: `jaxmotion platform` adds links.
    codecs: codecs to time.
    largest: elements of the largest array.
    sizes: number of sizes of each operation.
    repeats: number of times that each size is timed.
    report: called with the number of rounds done, after each.

  Returns:
    The platform, with its curves, the date and the place of the measurement.

  Raises:
    TypeError: an argument of another type.
    ValueError: more workers than devices, or a number out of its range.

  Example:
    >>> found = calibrate_platform(workers=1, largest=4096, sizes=2, repeats=1)
    >>> found.device.memory_rate.bytes_per_s > 0
    True
  """
  core.check_text("name", name)
  core.check_text("axis", axis)
  workers = jax.device_count() if workers is None else workers
  core.check_int("workers", workers, 1)
  codecs = core.check_sequence("codecs", codecs, "codecs")
  for i, codec in enumerate(codecs):
    check_codec(f"codecs[{i}]", codec, one_round=True)
  core.check_int("largest", largest, 1 << 12, 2**31 - 1)
  core.check_int("sizes", sizes, 2, 64)
  core.check_int("repeats", repeats, 1, 10_000)
  if report is not None:
    core.check_callable("report", report)
  timer = prepare_timer(workers, codecs, largest, sizes)
  for done in range(1, repeats + 1):
    timer.run_round()
    if report is not None:
      report(done)
  return _fit_platform.make_platform(name, axis, workers, *timer.make_curves())


def prepare_timer(
  workers: int,
  codecs: Sequence[Codec],
  largest: int,
  sizes: int,
  barrier: Callable[[], object] = lambda: None,
) -> _timer.ProbeTimer:
  """Compiles all operations that are timed.

  Args:
    workers: number of devices that work at once.
    codecs: codecs to time.
    largest: elements of the largest array.
    sizes: number of sizes of each operation.
    barrier: waits for the other processes of a job of several.
  """
  mesh = _probes.make_mesh(workers)
  probes = _probes.compute_probes(mesh, largest, sizes)
  if codecs:
    probes += _probes.update_probes(mesh, largest, sizes)
  for codec in codecs:
    probes += _probes.codec_probes(mesh, codec, largest, sizes)
  if workers > 1:
    probes += _probes.collective_probes(mesh, largest, sizes)
  return _timer.ProbeTimer(mesh, probes, barrier)
