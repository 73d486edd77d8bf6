"""Faults of disks, folders and clocks, and how training jobs end."""

import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

from experiments.fuzz import fault_jobs, rounds

_PAGE = 4096  # Bytes that a file takes a multiple of.
_START_S = 120  # A job has a checkpoint by then.


Fault = Callable[[fault_jobs.Rig, pathlib.Path, random.Random], str]
"""Runs a job and returns what is wrong with how it ended."""


def run_faults(
  rig: fault_jobs.Rig,
  expected: fault_jobs.Outcome,
  seed: int,
  faults: dict[str, Fault],
) -> rounds.Round:
  """Runs a job under each fault and compares its end."""
  chooser = random.Random(seed)
  defects: list[rounds.Defect] = []
  for name, fault in faults.items():
    workdir = rig.folder / f"fault-{name}"
    shutil.rmtree(workdir, ignore_errors=True)
    detail = fault(rig, workdir, chooser) or _resume(rig, workdir, expected)
    if detail:
      law = "a fault ends a job with one line, and it goes on bit for bit"
      defects.append(rounds.Defect(law, f"{name}, seed {seed}", detail))
  return rounds.Round(len(faults), tuple(defects))


def _resume(
  rig: fault_jobs.Rig, workdir: pathlib.Path, expected: fault_jobs.Outcome
) -> str:
  """Returns what is wrong with a job after its fault, if anything."""
  ended = rig.start(workdir).finish()
  if any(end.code for end in ended):
    return f"it does not go on: {ended}"
  found = fault_jobs.read_outcome(workdir)
  return "" if found == expected else f"it ends with {found}, not {expected}"


def _expect_line(ended: fault_jobs.Ended, pattern: str) -> str:
  """Returns what is wrong with the end of a refused job, if anything."""
  lines = ended.said.splitlines()
  if ended.code == 1 and len(lines) == 1 and re.search(pattern, lines[0]):
    return ""
  return f"no line like {pattern!r}: {ended}"


def _interrupt(
  rig: fault_jobs.Rig, workdir: pathlib.Path, checkpoints: int = 1
) -> None:
  """Kills a job that has some checkpoints."""
  job = rig.start(workdir)
  deadline = time.monotonic() + _START_S
  while len(_list_checkpoints(workdir)) < checkpoints:
    if time.monotonic() > deadline or job.wait(0.0):
      job.kill()
      raise RuntimeError("the job has no checkpoint")
    time.sleep(0.001)
  job.kill()


def _list_checkpoints(workdir: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders of the checkpoints, latest last."""
  folders = [p for p in workdir.glob("checkpoints/*/*") if p.name.isdigit()]
  return sorted(folders, key=lambda path: int(path.name))


def _list_files(workdir: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of the last checkpoint."""
  paths = sorted(_list_checkpoints(workdir)[-1].rglob("*"))
  return [path for path in paths if path.is_file()]


def fill_disk(
  rig: fault_jobs.Rig, workdir: pathlib.Path, chooser: random.Random
) -> str:
  """Runs a job on a disk that is full after its second checkpoint."""
  _interrupt(rig, workdir)
  sizes = [path.stat().st_size for path in _list_files(workdir)]
  shutil.rmtree(workdir)
  workdir.mkdir()
  limit = max(sizes) - 1
  pages = sum(-(-size // _PAGE) for size in sizes)
  space = _PAGE * (2 * pages + chooser.randrange(pages))

  def limit_files() -> None:
    # A write past this size fails, as one to a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

  mount = ["mount", "-t", "tmpfs", "-o", f"size={space}", "none"]
  mounted = subprocess.run([*mount, workdir], capture_output=True)
  if mounted.returncode:
    (ended,) = rig.start(workdir, prepare=limit_files).finish()
    return _expect_line(ended, "checkpoint of step .* File too large")
  try:
    (ended,) = rig.start(workdir).finish()
    detail = _expect_line(ended, "cannot be written .* No space left")
    copy = workdir.with_name(f"{workdir.name}-copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(workdir, copy)
  finally:
    subprocess.run(["umount", workdir], check=True)
  workdir.rmdir()
  copy.rename(workdir)
  return detail


def refuse_writes(
  rig: fault_jobs.Rig, workdir: pathlib.Path, chooser: random.Random
) -> str:
  """Runs a job on a folder that takes no files."""
  (ended,) = rig.start(pathlib.Path("/proc/self/none")).finish()
  return _expect_line(ended, "`workdir` must be a folder that this process can")


def give_file(
  rig: fault_jobs.Rig, workdir: pathlib.Path, chooser: random.Random
) -> str:
  """Runs a job on a file instead of a folder."""
  workdir.write_bytes(b"")
  (ended,) = rig.start(workdir).finish()
  workdir.unlink()
  return _expect_line(ended, "`workdir` must be a folder, got .* is a file")


def share_folder(
  rig: fault_jobs.Rig, workdir: pathlib.Path, chooser: random.Random
) -> str:
  """Runs a second job on the folder of a job that has been stopped."""
  job = rig.start(workdir)
  deadline = time.monotonic() + _START_S
  while not (workdir / "config.json").exists():
    if time.monotonic() > deadline or job.wait(0.0):
      return f"no job to share with: {job.kill()}"
  job.send(0, signal.SIGSTOP)
  (ended,) = rig.start(workdir).finish()
  detail = _expect_line(ended, f"which process {job.pids[0]} on host .* uses")
  job.send(0, signal.SIGCONT)
  (first,) = job.finish()
  return detail or (f"the first job fails: {first}" if first.code else "")


def break_checkpoint(
  rig: fault_jobs.Rig, workdir: pathlib.Path, chooser: random.Random
) -> str:
  """Flips a bit of the last checkpoint of a killed job and goes on."""
  _interrupt(rig, workdir, checkpoints=2)
  path = chooser.choice(_list_files(workdir))
  data = bytearray(path.read_bytes())
  data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
  path.write_bytes(data)
  ended, *others = rig.start(workdir).finish()
  lines = ended.said.splitlines()
  step, name = path.relative_to(workdir).parts[2], path.name
  pattern = f"/{step} is broken: .*{name} does not match"
  if len(lines) == 1 and re.search(pattern, lines[0]):
    return ""
  return f"no single line about the broken checkpoint: {ended} {others}"


def move_times(
  rig: fault_jobs.Rig, workdir: pathlib.Path, chooser: random.Random
) -> str:
  """Gives the files of a killed job times in the past and in the future."""
  _interrupt(rig, workdir, checkpoints=2)
  for path in workdir.rglob("*"):
    moment = chooser.uniform(0.0, 4e9)
    os.utime(path, (moment, moment))
  return ""


def jump_clock(
  rig: fault_jobs.Rig, workdir: pathlib.Path, chooser: random.Random
) -> str:
  """Runs a job whose wall clock jumps at every look, as Python sees it."""
  seed = chooser.random()

  def break_clock() -> None:
    moments = random.Random(seed)
    time.time = lambda: moments.uniform(0.0, 4e9)
    time.time_ns = lambda: moments.randrange(4 * 10**18)

  (ended,) = rig.start(workdir, prepare=break_clock).finish()
  if not ended.code and not ended.said:
    return ""
  # Orbax waits for its own threads by this clock.
  return _expect_line(ended, "checkpoint of step .* (Timeout|timed out)")


FAULTS: dict[str, Fault] = {
  "full disk": fill_disk,
  "no writes": refuse_writes,
  "file": give_file,
  "two jobs": share_folder,
  "flipped bit": break_checkpoint,
  "times of files": move_times,
  "clock": jump_clock,
}
"""Faults of jobs of one process by name."""

PART_FAULTS: dict[str, Fault] = {
  f"flipped bit {i} of several processes": break_checkpoint for i in range(4)
}
"""Faults of jobs of several processes by name."""
