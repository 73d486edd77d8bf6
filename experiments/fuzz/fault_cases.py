"""Faults of disks, folders, clocks and links, and how training jobs end."""

import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from experiments.common import distributed
from experiments.fuzz import fault_jobs, fault_kills
from experiments.fuzz.fault_jobs import Ended, Outcome, Rig
from experiments.fuzz.rounds import Defect, Round
from experiments.hosts import links, processes
from experiments.hosts.links import Host
from experiments.hosts.processes import HostProcess

_PAGE = 4096  # Bytes that a file takes a multiple of.
# A link may carry nothing for so long without an end of the job.
_SHORT_S = 5.0
_WAIT_S = 120.0  # A job on hosts has a checkpoint, or ends, by then.

Fault = Callable[[Rig, Path, Random], str]
"""Runs a job and returns what is wrong with how it ended."""


def run_faults(
  rig: Rig, expected: Outcome, seed: int, faults: dict[str, Fault]
) -> Round:
  """Runs a job under each fault and compares its end."""
  chooser = Random(seed)
  defects: list[Defect] = []
  for name, fault in faults.items():
    workdir = rig.folder / f"fault-{name}"
    shutil.rmtree(workdir, ignore_errors=True)
    detail = fault(rig, workdir, chooser) or _resume(rig, workdir, expected)
    if detail:
      law = "a fault ends a job with one line, and it goes on bit for bit"
      defects.append(Defect(law, f"{name}, seed {seed}", detail))
  return Round(len(faults), tuple(defects))


def _resume(rig: Rig, workdir: Path, expected: Outcome) -> str:
  """Returns what is wrong with a job after its fault, if anything."""
  ended = rig.start(workdir).finish()
  if any(end.code for end in ended):
    return f"it does not go on: {ended}"
  found = fault_jobs.read_outcome(workdir)
  return "" if found == expected else f"it ends with {found}, not {expected}"


def _expect_line(ended: Ended, pattern: str) -> str:
  """Returns what is wrong with the end of a refused job, if anything."""
  lines = ended.said.splitlines()
  if ended.code == 1 and len(lines) == 1 and re.search(pattern, lines[0]):
    return ""
  return f"no line like {pattern!r}: {ended}"


def _interrupt(rig: Rig, workdir: Path, checkpoints: int = 1) -> list[Path]:
  """Kills a job that has some checkpoints; returns the files of the last."""
  job = rig.start(workdir)
  count = lambda: len(fault_jobs.list_checkpoints(workdir))
  is_saved = job.wait_until(lambda: count() >= checkpoints)
  job.kill()
  if not is_saved:
    raise RuntimeError("the job has no checkpoint")
  paths = sorted(fault_jobs.list_checkpoints(workdir)[-1].rglob("*"))
  return [path for path in paths if path.is_file()]


def fill_disk(rig: Rig, workdir: Path, chooser: Random) -> str:
  """Runs a job on a disk that is full after its second checkpoint."""
  sizes = [path.stat().st_size for path in _interrupt(rig, workdir)]
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


def refuse_writes(rig: Rig, workdir: Path, chooser: Random) -> str:
  """Runs a job on a folder that takes no files."""
  (ended,) = rig.start(Path("/proc/self/none")).finish()
  return _expect_line(ended, "`workdir` must be a folder that this process can")


def give_file(rig: Rig, workdir: Path, chooser: Random) -> str:
  """Runs a job on a file instead of a folder."""
  workdir.write_bytes(b"")
  (ended,) = rig.start(workdir).finish()
  workdir.unlink()
  return _expect_line(ended, "`workdir` must be a folder, got .* is a file")


def share_folder(rig: Rig, workdir: Path, chooser: Random) -> str:
  """Runs a second job on the folder of a job that has been stopped."""
  job = rig.start(workdir)
  if not job.wait_until((workdir / "config.json").exists):
    return f"no job to share with: {job.kill()}"
  job.send(0, signal.SIGSTOP)
  (ended,) = rig.start(workdir).finish()
  detail = _expect_line(ended, f"which process {job.pids[0]} on host .* uses")
  job.send(0, signal.SIGCONT)
  (first,) = job.finish()
  return detail or (f"the first job fails: {first}" if first.code else "")


def break_checkpoint(rig: Rig, workdir: Path, chooser: Random) -> str:
  """Flips a bit of the last checkpoint of a killed job and goes on."""
  path = chooser.choice(_interrupt(rig, workdir, checkpoints=2))
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


def move_times(rig: Rig, workdir: Path, chooser: Random) -> str:
  """Gives the files of a killed job times in the past and in the future."""
  _interrupt(rig, workdir, checkpoints=2)
  for path in workdir.rglob("*"):
    moment = chooser.uniform(0.0, 4e9)
    os.utime(path, (moment, moment))
  return ""


def jump_clock(rig: Rig, workdir: Path, chooser: Random) -> str:
  """Runs a job whose wall clock jumps at every look, as Python sees it."""
  seed = chooser.random()

  def break_clock() -> None:
    moments = Random(seed)
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


def run_links(rig: Rig, expected: Outcome) -> tuple[Round, float]:
  """Cuts the link of a job of two hosts, for a while and for ever."""
  # Returns two cases, and the seconds in which the job ended on the dead link.
  defects = []
  for is_short in (True, False):
    workdir = rig.folder / ("short" if is_short else "dead")
    ended, seconds = _cut_link(rig, workdir, is_short)
    codes = [code for code, _ in ended]
    detail = ""
    if is_short:
      found = fault_jobs.read_outcome(workdir) if codes == [0, 0] else None
      if found != expected:
        detail = f"it ends with {ended}"
    elif (
      0 in codes
      or seconds > fault_kills.END_S
      or any("Traceback" in said for _, said in ended)
    ):
      detail = f"it ends with {ended} after {seconds:.0f} s"
    if detail:
      law = "a job outlives a short pause of its link, and no dead link"
      defects.append(Defect(law, workdir.name, detail))
  return Round(2, tuple(defects)), seconds


def _cut_link(
  rig: Rig, workdir: Path, is_short: bool
) -> tuple[list[tuple[int, str]], float]:
  """Returns how the processes of a job end, and the seconds that they take."""
  with links.linked_hosts(2) as hosts:
    jobs = _start_hosts(rig, workdir, hosts)
    try:
      deadline = time.monotonic() + _WAIT_S
      while not fault_jobs.find_step(workdir):
        if time.monotonic() > deadline or any(job.has_ended() for job in jobs):
          raise RuntimeError(f"the job in {workdir} has no checkpoint")
        time.sleep(0.01)
      links.set_link(hosts[1], "down")
      begin = time.monotonic()
      if is_short:
        time.sleep(_SHORT_S)
        links.set_link(hosts[1], "up")
      ended = [job.wait(_WAIT_S) for job in jobs]
      return ended, time.monotonic() - begin
    finally:
      for job in jobs:
        job.kill()
        job.close()


def _start_hosts(
  rig: Rig, workdir: Path, hosts: list[Host]
) -> list[HostProcess]:
  """Starts a process of the job on each host."""
  address = f"{hosts[0].address}:{processes.find_free_port()}"
  # The emulated devices of this process are not those of the job.
  variables = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
  return [
    HostProcess(
      host,
      "experiments.train",
      [
        *rig.arguments(workdir),
        *distributed.member_flags(address, len(hosts), index),
      ],
      f"host {index}",
      variables,
    )
    for index, host in enumerate(hosts)
  ]
