"""A long training job, whose memory, files and threads must not grow."""

import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from experiments.fuzz import fault_jobs
from experiments.fuzz.fault_jobs import Rig
from experiments.fuzz.rounds import Defect, Round

_PERIOD_S = 0.5
_STEPS = 10_000_000  # More than a soak makes.
# A log of the steps is kept: 2 floats and 2 entries of lists a step.
_GROWTH_KB = 8192.0
"""Growth of the memory that is no defect: allocators keep some."""
_SAVE_KB = 48.0
"""Growth by a save that is no defect: 30 to 40 KiB stay, half of them in the
metrics of TensorStore, which orbax writes with."""


class Sample(NamedTuple):
  """Resources that a process holds at one moment."""

  memory_kb: float  # Resident memory, KiB.
  descriptors: float  # Open files.
  threads: float  # Threads.
  files: float  # Files in the work folder.


_NOTHING = Sample(0.0, 0.0, 0.0, 0.0)


class Soak(NamedTuple):
  """Outcome of a job that was watched."""

  round: Round  # Samples as cases, and defects.
  growth: Sample  # Growth from the second quarter of the time to the last one.
  saves: int  # Checkpoints that were written from the second quarter on.


def run_soak(folder: Path, minutes: float) -> Soak:
  """Runs a job for some minutes and watches what it holds."""
  rig = Rig(folder, steps=_STEPS)
  workdir = folder / "soak"
  shutil.rmtree(workdir, ignore_errors=True)
  job = rig.start(workdir)
  samples: list[Sample] = []
  steps: list[int] = []
  end = time.monotonic() + 60 * minutes
  while time.monotonic() < end:
    if job.wait(_PERIOD_S):
      detail = str(job.kill())
      defect = Defect("a job goes on", f"--minutes={minutes}", detail)
      return Soak(Round(len(samples), (defect,)), _NOTHING, 0)
    if step := fault_jobs.find_step(workdir):
      steps.append(step)
      samples.append(_take_sample(job.pids[0], workdir))
  job.kill()
  growth = _measure_growth(samples)
  saves = 0
  if samples:
    saves = (steps[-1] - steps[len(steps) // 4]) // fault_jobs.CHECKPOINT_EVERY
  allowed = Sample(_GROWTH_KB + _SAVE_KB * saves, 0.0, 0.0, 0.0)
  defects = tuple(
    Defect("nothing grows", f"--minutes={minutes}", f"{name} by {grown}")
    for name, grown, limit in zip(Sample._fields, growth, allowed, strict=True)
    if grown > limit
  )
  return Soak(Round(len(samples), defects), growth, saves)


def _take_sample(pid: int, workdir: Path) -> Sample:
  process = Path("/proc", str(pid))
  status = dict(
    line.split(":", 1) for line in (process / "status").read_text().splitlines()
  )
  return Sample(
    float(status["VmRSS"].split()[0]),
    len(list((process / "fd").iterdir())),
    float(status["Threads"]),
    # Folders may vanish while they are walked.
    sum(len(files) for _, _, files in os.walk(workdir)),
  )


def _measure_growth(samples: list[Sample]) -> Sample:
  """Returns the least of the last quarter less that of the second quarter."""
  # A save holds threads and files for a while: the least is held all the time.
  quarter = len(samples) // 4
  if not quarter:
    return _NOTHING
  early, late = samples[quarter : 2 * quarter], samples[-quarter:]
  growth = [
    min(after) - min(before)
    for before, after in zip(
      zip(*early, strict=True), zip(*late, strict=True), strict=True
    )
  ]
  return Sample(*growth)
