"""Links that carry nothing for a while or for ever, between two hosts."""

import os
import pathlib
import subprocess
import sys
import time

from experiments.common import distributed
from experiments.fuzz import fault_jobs, rounds
from experiments.hosts import links, processes

SHORT_S = 5.0
"""Seconds that a link may carry nothing without an end of the job."""

END_S = distributed.HEARTBEAT_TIMEOUT_S + 15
"""Seconds in which all processes end when a link stays dead, at the latest."""

_WAIT_S = 120.0
_ROOT = pathlib.Path(__file__).parents[2]


def run_links(
  rig: fault_jobs.Rig, expected: fault_jobs.Outcome
) -> tuple[rounds.Round, float]:
  """Cuts the link of a job of two hosts, for a while and for ever."""
  # Returns two cases, and the seconds in which the job ended on the dead link.
  defects = []
  seconds = 0.0
  for is_short in (True, False):
    workdir = rig.folder / ("short" if is_short else "dead")
    with links.linked_hosts(2) as hosts:
      jobs = _start_hosts(rig, workdir, hosts)
      try:
        _wait_for_checkpoint(workdir, jobs)
        _set_link(hosts[1], "down")
        begin = time.monotonic()
        if is_short:
          time.sleep(SHORT_S)
          _set_link(hosts[1], "up")
        codes = [job.wait(_WAIT_S) for job in jobs]
        if not is_short:
          seconds = time.monotonic() - begin
      finally:
        for job in jobs:
          job.kill()
          job.wait()
    detail = _find_fault(rig, workdir, is_short, codes, seconds, expected)
    if detail:
      law = "a job outlives a short pause of its link, and no dead link"
      defects.append(rounds.Defect(law, workdir.name, detail))
  return rounds.Round(2, tuple(defects)), seconds


def _find_fault(
  rig: fault_jobs.Rig,
  workdir: pathlib.Path,
  is_short: bool,
  codes: list[int],
  seconds: float,
  expected: fault_jobs.Outcome,
) -> str:
  """Returns what is wrong with how a job ended, if anything."""
  said = [_log_path(rig, workdir, i).read_text()[-1500:] for i in range(2)]
  if is_short:
    is_exact = codes == [0, 0] and fault_jobs.read_outcome(workdir) == expected
    return "" if is_exact else f"it ends with {codes}: {said}"
  if 0 in codes or seconds > END_S or any("Traceback" in s for s in said):
    return f"it ends with {codes} after {seconds:.0f} s: {said}"
  return ""


def _start_hosts(
  rig: fault_jobs.Rig, workdir: pathlib.Path, hosts: list[links.Host]
) -> list[subprocess.Popen]:
  """Starts a process of the job on each host."""
  address = f"{hosts[0].address}:{processes.find_free_port()}"
  started = []
  for index, host in enumerate(hosts):
    program = [sys.executable, "-m", "experiments.train"]
    members = [
      f"--coordinator_address={address}",
      f"--num_processes={len(hosts)}",
      f"--process_id={index}",
    ]
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    with _log_path(rig, workdir, index).open("wb") as log:
      started.append(
        subprocess.Popen(
          host.command([*program, *rig.arguments(workdir), *members]),
          cwd=_ROOT,
          env=kept | {"JAX_PLATFORMS": "cpu"},
          stdout=subprocess.DEVNULL,
          stderr=log,
        )
      )
  return started


def _log_path(
  rig: fault_jobs.Rig, workdir: pathlib.Path, index: int
) -> pathlib.Path:
  return rig.folder / f"{workdir.name}-stderr-{index}"


def _wait_for_checkpoint(
  workdir: pathlib.Path, jobs: list[subprocess.Popen]
) -> None:
  deadline = time.monotonic() + _WAIT_S
  while not list(workdir.glob("checkpoints/*/*[02468]")):
    if time.monotonic() > deadline or any(job.poll() for job in jobs):
      raise RuntimeError(f"the job in {workdir} has no checkpoint")
    time.sleep(0.01)


def _set_link(host: links.Host, state: str) -> None:
  assert host.namespace is not None
  link = ["ip", "-n", host.namespace, "link", "set", host.interface, state]
  subprocess.run(link, check=True)
