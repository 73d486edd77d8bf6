"""Kills of training jobs at random moments, and how the jobs go on.

They go on as they were, or with other numbers of workers.
"""

import dataclasses
import itertools
import math
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from experiments.common import distributed
from experiments.common.checkpoint import BrokenFileError
from experiments.fuzz import fault_jobs
from experiments.fuzz.fault_jobs import Ended, Job, Outcome, Rig
from experiments.fuzz.rounds import Defect

END_S = distributed.HEARTBEAT_TIMEOUT_S + 15
"""Seconds in which the other processes of a job end, at the latest."""

_COMPILING = 0.1  # Share of the starts that compile.
_STARTING = 0.4  # Share of the signals that may come before a checkpoint.
_STOPPED_S = 1.0  # Pause of a stopped job of one process.
_END_WORDS = "ended: ", "Stopped"


@dataclasses.dataclass
class Kills:
  """Counts of the signals that jobs were sent."""

  sent: int = 0  # Processes that were sent a signal.
  # Of these, in jobs that went on and ended bit for bit as a job that nothing
  # interrupted.
  exact: int = 0
  # Of these, before the job had a checkpoint since its start.
  starting: int = 0
  writing: int = 0  # Of these, while a checkpoint was written.
  longest_s: float = 0.0  # Longest time in which the other processes ended.
  # What broke a law.
  defects: list[Defect] = dataclasses.field(default_factory=list)


def run_kills(
  rig: Rig,
  kills: int,
  seed: int,
  signals: Sequence[signal.Signals] = (signal.SIGKILL,),
  report: Callable[[Kills], None] = lambda counts: None,
) -> Kills:
  """Sends signals to jobs at random moments until they have been sent."""
  # A job is started again on its work folder until it ends by itself. Then its
  # state is compared with that of a job that nothing interrupted.
  chooser = Random(seed)
  counts = Kills()
  expected, seconds, stepping_s = _run_straight(rig, counts)
  case = f"--kills={kills} --processes={rig.processes} --seed={seed}"
  chain = 0
  while counts.sent < kills and len(counts.defects) < 10:
    chain += 1
    workdir = rig.folder / f"killed-{chain}"
    before = counts.sent
    done: list[Ended] | None = None
    while done is None:
      steps = fault_jobs.find_step(workdir)
      partials = _list_partials(workdir)
      is_cached = chooser.random() > _COMPILING
      job = rig.start(workdir, is_cached=is_cached)
      if counts.sent == kills:
        done = job.finish()
      else:
        if chooser.random() < _STARTING:
          done = job.wait(chooser.uniform(0.0, seconds))
        else:
          wait_for_step(job, workdir, steps)
          done = job.wait(chooser.uniform(0.0, stepping_s))
      if done is None:
        sent = chooser.choice(signals)
        victim = chooser.randrange(rig.processes)
        where = f"{case}: {sent.name} {counts.sent} to process {victim}"
        _send_signal(job, victim, sent, where, counts)
        counts.writing += bool(_list_partials(workdir) - partials)
        _check_state(workdir, expected, steps, where, counts)
        report(counts)
    detail = _compare_end(workdir, done, expected)
    if detail:
      law = "a killed job goes on bit for bit"
      counts.defects.append(Defect(law, f"{case}: job {chain}", detail))
    else:
      counts.exact += counts.sent - before
      shutil.rmtree(workdir)
    report(counts)
  return counts


def _run_straight(rig: Rig, counts: Kills) -> tuple[Outcome, float, float]:
  """Returns the state that nothing interrupted, and the seconds it took."""
  # Returns the state, the seconds of the job, and those after its first
  # checkpoint.
  found = []
  for index in range(2):  # The first one compiles.
    workdir = rig.folder / f"straight-{index}"
    begin = time.monotonic()
    job = rig.start(workdir)
    wait_for_step(job, workdir, 0)
    first = time.monotonic()
    ended = job.finish()
    seconds = time.monotonic() - begin
    if any(end.code for end in ended):
      text = f"the job fails by itself: {[end.said[:500] for end in ended]}"
      raise RuntimeError(text)
    found.append(fault_jobs.read_outcome(workdir))
  if found[0] != found[1]:
    law = "a job gives the same bits twice"
    counts.defects.append(Defect(law, "straight", _differ(*found)))
  return found[0], seconds, time.monotonic() - first


def wait_for_step(job: Job, workdir: Path, step: int) -> None:
  """Waits until a job has a checkpoint past a step, or has ended."""
  job.wait_until(lambda: fault_jobs.find_step(workdir) > step)


def _send_signal(
  job: Job, victim: int, sent: signal.Signals, where: str, counts: Kills
) -> None:
  """Sends a signal and sees how all processes end."""
  job.send(victim, sent)
  counts.sent += 1
  begin = time.monotonic()
  if sent == signal.SIGSTOP and len(job.pids) == 1:
    time.sleep(_STOPPED_S)
    job.kill()
    return
  if sent == signal.SIGSTOP:
    others = _wait_for_others(job, victim)
    job.send(victim, signal.SIGKILL)
  else:
    others = job.wait(END_S) is not None
  counts.longest_s = max(counts.longest_s, time.monotonic() - begin)
  if not others:
    law = f"a job ends in {END_S} s"
    counts.defects.append(Defect(law, where, "it did not"))
  for index, end in enumerate(job.kill()):
    law = "a process ends with one line and a code"
    if index == victim and sent in (signal.SIGKILL, signal.SIGSTOP):
      continue
    own = [x for x in end.said.splitlines() if any(w in x for w in _END_WORDS)]
    is_plain = "Traceback" not in end.said and len(own) < 2
    # It may have ended well before the signal came.
    if not is_plain or (index == victim and end.code not in (0, 1, 128 + sent)):
      text = f"process {index} ended with {end.code}: {end.said[-1500:]}"
      counts.defects.append(Defect(law, where, text))


def _wait_for_others(job: Job, victim: int) -> bool:
  """Returns whether all processes but one have ended in time."""
  deadline = time.monotonic() + END_S
  while time.monotonic() < deadline:
    job.wait(0.0)
    if all(job.has_ended(i) for i in range(len(job.pids)) if i != victim):
      return True
    time.sleep(0.01)
  return False


def _check_state(
  workdir: Path, expected: Outcome, steps: int, where: str, counts: Kills
) -> None:
  """Checks that what a killed job has left is whole and right so far."""
  try:
    left = fault_jobs.read_outcome(workdir)
  except BrokenFileError as error:
    law = "a kill leaves no broken checkpoint"
    counts.defects.append(Defect(law, where, str(error)))
    return
  counts.starting += len(left.losses) == steps
  if left.losses != expected.losses[: len(left.losses)]:
    law = "every step is that of a job that nothing interrupted"
    counts.defects.append(Defect(law, where, _differ(expected, left)))


def _list_partials(workdir: Path) -> set[str]:
  """Returns the names of checkpoints that were not written to the end."""
  return {path.name for path in workdir.glob("checkpoints/*/*.partial-*")}


def _compare_end(workdir: Path, ended: list[Ended], expected: Outcome) -> str:
  """Returns what is wrong with a job that was not interrupted any more."""
  if any(end.code for end in ended):
    return f"it fails: {ended}"
  if any("broken" in end.said for end in ended):
    return f"it finds a broken file: {ended}"
  found = fault_jobs.read_outcome(workdir)
  return "" if found == expected else _differ(expected, found)


def _differ(expected: Outcome, found: Outcome) -> str:
  """Returns the first difference between two states, as text."""
  pairs = zip(expected.losses, found.losses, strict=False)
  for step, (ours, theirs) in enumerate(pairs):
    if ours != theirs:
      return f"loss {theirs} instead of {ours} at step {step}"
  for name in Outcome._fields:
    if getattr(expected, name) != getattr(found, name):
      return f"{name}: {getattr(found, name)}, not {getattr(expected, name)}"
  return "nothing differs"


SIZES = ((1, 2), (1, 1), (2, 4), (1, 8), (2, 2), (1, 4))
"""Processes and workers of the jobs, in turn."""


def run_resizes(
  folder: Path,
  kills: int,
  seed: int,
  *,
  steps: int,
  report: Callable[[Kills], None] = lambda counts: None,
) -> Kills:
  """Kills jobs at random moments; each goes on with other workers."""
  # No step may be lost or repeated with another loss: the losses in the
  # checkpoint that a killed job left are the first losses of the job that ends.
  chooser = Random(seed)
  rigs = itertools.cycle(
    [Rig(folder, count, steps, workers) for count, workers in SIZES]
  )
  counts = Kills()
  chain = 0
  while counts.sent < kills and len(counts.defects) < 10:
    chain += 1
    workdir = folder / f"resized-{chain}"
    before = counts.sent
    left: list[float] = []
    detail, done = "", None
    while not done and not detail:
      job = next(rigs).start(workdir)
      if counts.sent == kills:
        done = job.finish()
        break
      wait_for_step(job, workdir, len(left))
      done = job.wait(chooser.uniform(0.0, 1.0))
      if not done:
        job.kill()
        counts.sent += 1
        report(counts)
        detail, left = _compare_losses(workdir, left)
    if done:
      detail = _compare_resized(workdir, done, left, steps)
    if detail:
      law = "other workers continue a killed job"
      case = f"--resizes={kills} --seed={seed}: job {chain}"
      counts.defects.append(Defect(law, case, detail))
    else:
      counts.exact += counts.sent - before
    report(counts)
  return counts


def _compare_losses(
  workdir: Path, before: list[float]
) -> tuple[str, list[float]]:
  """Returns what is wrong with the losses so far, and them."""
  try:
    losses = fault_jobs.read_outcome(workdir).losses
  except BrokenFileError as error:
    return f"a broken checkpoint: {error}", before
  if losses[: len(before)] != before:
    return f"{len(before)} losses became others", losses
  return "", losses


def _compare_resized(
  workdir: Path, ended: list[Ended], before: list[float], steps: int
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
