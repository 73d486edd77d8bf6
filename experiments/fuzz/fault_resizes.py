"""Kills of training jobs that other numbers of workers continue."""

import math
import pathlib
import random
import signal
from collections.abc import Callable

from experiments.common import manifest
from experiments.fuzz import fault_jobs, fault_kills, rounds

SIZES = ((1, 2), (1, 1), (2, 4), (1, 8), (2, 2), (1, 4))
"""Processes and workers of the jobs, in turn."""

_LAW = "other workers continue a killed job"


def run_resizes(
  folder: pathlib.Path,
  kills: int,
  seed: int,
  *,
  steps: int,
  report: Callable[[fault_kills.Kills], None] = lambda counts: None,
) -> fault_kills.Kills:
  """Kills jobs at random moments; each goes on with other workers."""
  # No step may be lost or repeated with another loss: the losses in the
  # checkpoint that a killed job left are the first losses of the job that ends.
  chooser = random.Random(seed)
  rigs = [
    fault_jobs.Rig(folder, count, steps, workers) for count, workers in SIZES
  ]
  counts = fault_kills.Kills()
  chain = turn = 0
  while counts.sent < kills and len(counts.defects) < 10:
    chain += 1
    workdir = folder / f"resized-{chain}"
    case = f"--resizes={kills} --seed={seed}: job {chain}"
    before = counts.sent
    left: list[float] = []
    done: list[fault_jobs.Ended] | None = None
    while done is None:
      job = rigs[turn % len(rigs)].start(workdir)
      turn += 1
      if counts.sent == kills:
        done = job.finish()
        break
      fault_kills.wait_for_step(job, workdir, len(left))
      done = job.wait(chooser.uniform(0.0, 1.0))
      if done is None:
        job.send(chooser.randrange(len(job.pids)), signal.SIGKILL)
        job.kill()
        counts.sent += 1
        report(counts)
        detail, left = _compare_losses(workdir, left)
        if detail:
          counts.defects.append(rounds.Defect(_LAW, case, detail))
          break
    detail = _compare_end(workdir, done, left, steps) if done else ""
    if detail:
      counts.defects.append(rounds.Defect(_LAW, case, detail))
    elif done:
      counts.exact += counts.sent - before
    report(counts)
  return counts


def _compare_losses(
  workdir: pathlib.Path, before: list[float]
) -> tuple[str, list[float]]:
  """Returns what is wrong with the losses so far, and them."""
  try:
    losses = fault_jobs.read_outcome(workdir).losses
  except manifest.BrokenFileError as error:
    return f"a broken checkpoint: {error}", before
  if losses[: len(before)] != before:
    return f"{len(before)} losses became others", losses
  return "", losses


def _compare_end(
  workdir: pathlib.Path,
  ended: list[fault_jobs.Ended],
  before: list[float],
  steps: int,
) -> str:
  """Returns what is wrong with a job that ended by itself."""
  if any(end.code for end in ended):
    return f"it fails: {ended}"
  detail, losses = _compare_losses(workdir, before)
  if not detail and (
    len(losses) != steps or not all(map(math.isfinite, losses))
  ):
    detail = f"{len(losses)} losses, not {steps} finite ones"
  return detail
