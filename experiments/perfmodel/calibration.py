"""Calibration: times probes on this machine and makes a platform of them."""

from collections.abc import Callable, Sequence

import rich.progress

from experiments.perfmodel.curves import ProbeTimer
from experiments.perfmodel.platforms import make_platform
from experiments.perfmodel.probes import (
  codec_probes,
  collective_probes,
  compute_probes,
  make_mesh,
  update_probes,
)
from jaxmotion import perfmodel


def calibrate_platform(
  axis: str,
  workers: int,
  codecs: Sequence[str],
  largest: int,
  sizes: int,
  repeats: int,
) -> perfmodel.Platform:
  """Times everything and returns the platform of this machine.

  Args:
    axis: name of the devices' axis.
    workers: number of devices that work at once.
    codecs: names of `probes.CODECS`.
    largest: elements of the largest array.
    sizes: number of sizes of each operation.
    repeats: number of times that each size is timed.

  Returns:
    The platform, with its curves, the date and the place of the measurement.
  """
  timer = prepare_timer(workers, codecs, largest, sizes)
  for _ in rich.progress.track(range(repeats), "calibrating"):
    timer.run_round()
  return make_platform(axis, workers, *timer.make_curves())


def prepare_timer(
  workers: int,
  codecs: Sequence[str],
  largest: int,
  sizes: int,
  barrier: Callable[[], object] = lambda: None,
) -> ProbeTimer:
  """Compiles all operations that are timed.

  Args:
    workers: number of devices that work at once.
    codecs: names of `probes.CODECS`.
    largest: elements of the largest array.
    sizes: number of sizes of each operation.
    barrier: waits for the other processes of a job of several.
  """
  mesh = make_mesh(workers)
  probes = compute_probes(mesh, largest, sizes)
  if codecs:
    probes += update_probes(mesh, largest, sizes)
  for name in codecs:
    probes += codec_probes(mesh, name, largest, sizes)
  if workers > 1:
    probes += collective_probes(mesh, largest, sizes)
  return ProbeTimer(mesh, probes, barrier)
