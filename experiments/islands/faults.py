"""Kills, pauses and slows islands, and takes their store away.

  python -m experiments.islands.faults --json=results/islands_faults.jsonl

Each case has islands of real processes, and seeded faults. It fails if islands
stop, if a commit is missing, if an object is written twice, or if two islands
see other bits in one round. The network has 208 parameters, so that rounds are
short: `islands.links` measures times. A store is a folder, or moto's S3 server
in memory. `full_disk` mounts a disk, and needs root or user namespaces.
"""

import collections
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import obstore
import obstore.exceptions
import obstore.store
from absl import flags

from experiments.common import (
  console,
  list_flags,
  records,
  shared_flags,
  signals,
)
from experiments.common.console import JobError
from experiments.common.records import Measured, Metrics
from experiments.hosts import links
from experiments.hosts.processes import HostProcess, find_free_port
from experiments.islands import tables
from experiments.islands.worker import open_bucket

_POLL_S = 0.02
_PATIENCE_S = 240.0  # On a busy machine.
_LAST_ROUNDS = 100  # Without faults, at the end of a case.
_STEPS_AWAY = 20  # That each island makes while its store is away.
_TRIES = 5  # To take a store away: islands delete old rounds, which frees disk.
_DISK_BYTES = 1 << 20
_STEP_S, _SLOW_STEP_S = 0.005, 0.4
_SLOW_ROUNDS = 20  # Of a slow island. The others wait for it, up to the grace.

_SEEDS = flags.DEFINE_integer(
  "seeds", 1, "Runs of each case.", 1, allow_override=True
)
_JSON = shared_flags.define_rows()


class NoDiskError(JobError):
  """A machine that lets this process mount no disk."""


class Run:
  """Islands of one store, each a process or a job of several."""

  def __init__(self, folder: Path, seed: int, processes: int, server: str):
    self.folder, self.living = folder, dict[str, list[HostProcess]]()
    self.store, self._count = folder / "run", 0
    self._seed = seed
    self._processes, self._server = processes, server
    # Grace: shorter than an outage, longer than a request that times out.
    self._grace_s = 4.0 if server else 1.0
    self._objects = (
      open_bucket(server, timeout="1s")
      if server
      else obstore.store.LocalStore(self.store, mkdir=True)
    )
    self._tags: dict[str, str | None] = {}  # Of all objects so far.

  def add_island(self, step_s: float = _STEP_S) -> str:
    """Starts an island; returns its name."""
    name = f"island{self._count}"
    self._count += 1
    arguments = [
      *(f"--name={name}", f"--folder={self.folder}"),
      *(f"--server={self._server}", f"--grace_s={self._grace_s}"),
      *(f"--seed={self._seed}", f"--processes={self._processes}"),
      f"--step_s={step_s}",
      f"--coordinator=127.0.0.1:{find_free_port()}",
    ]
    variables = {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "",  # One device in each process.
      "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    (host,) = links.loopback_hosts(1)
    self.living[name] = [
      HostProcess(
        host,
        "experiments.islands.fault_worker",
        [*arguments, f"--rank={rank}"],
        f"{name}, process {rank}",
        variables,
      )
      for rank in range(self._processes)
    ]
    return name

  def kill_island(self, name: str) -> None:
    """Kills all processes of an island at once."""
    processes = self.living.pop(name)
    for process in processes:
      process.kill()
    for process in processes:
      process.close()

  def close(self) -> None:
    """Kills the processes of all islands."""
    for name in list(self.living):
      self.kill_island(name)

  def last_round(self, name: str) -> int:
    """Returns the newest round that all processes of an island have seen."""
    return min(
      max((seen["round"] for seen in self._read_log(name, rank)), default=-1)
      for rank in range(self._processes)
    )

  def newest_round(self) -> int:
    """Returns the newest round that a living island has seen."""
    return max(map(self.last_round, self.living))

  def count_steps(self, name: str) -> int:
    """Returns the number of steps that an island has made."""
    text = (self.folder / f"{name}.0.steps").read_text()
    return int(text or 0)  # It is being written.

  def _read_log(self, name: str, rank: int) -> list[dict]:
    """Returns what a process has seen."""
    log = self.folder / f"{name}.{rank}"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]

  def wait_for(self, is_done: Callable[[], bool]) -> None:
    """Waits while all islands live; raises `JobError` if that takes long."""
    deadline = time.monotonic() + _PATIENCE_S
    while not is_done():
      if time.monotonic() > deadline:
        raise JobError("The islands stopped.")
      self._watch_store()
      for process in (p for own in self.living.values() for p in own):
        if process.has_ended() and (ended := process.wait())[0]:
          raise JobError(f"{process.name} ended by itself: {ended}.")
      time.sleep(_POLL_S)

  def _watch_store(self) -> None:
    """Notes which objects there are; raises if one was written again."""
    # A store that is away shows none.
    with contextlib.suppress(obstore.exceptions.BaseError, OSError):
      for meta in itertools.chain(*obstore.list(self._objects)):
        if meta["path"].startswith(("contribution", "commit", "snapshot")):
          tag = self._tags.setdefault(meta["path"], meta["e_tag"])
          if tag != meta["e_tag"]:
            raise JobError(f"{meta['path']} was written twice.")

  def wait_newest(self, round: int) -> None:
    """Waits until an island has seen a round."""
    self.wait_for(lambda: self.newest_round() >= round)

  def wait_round(self, round: int) -> None:
    """Waits until every island has seen a round."""
    self.wait_for(lambda: min(map(self.last_round, self.living)) >= round)

  def finish(self, rounds: int = _LAST_ROUNDS) -> Metrics:
    """Trains on for some rounds; returns figures of the whole run."""
    self.wait_round(0)
    final = self.newest_round() + rounds
    part = self.folder / "part"
    part.write_text(str(final))
    part.rename(self.folder / "finish")
    ranks = [p for own in self.living.values() for p in own]
    self.wait_for(lambda: all(process.has_ended() for process in ranks))
    anchors = collections.defaultdict(set)
    for i in range(self._count):
      for rank in range(self._processes):
        for seen in self._read_log(f"island{i}", rank):
          anchors[seen["round"]].add((seen["anchor"], seen["error"]))
    # A commit may be deleted before it is noted: where an island has landed on
    # it, it was there.
    commits = {f"commit.{round:08d}" for round in range(final)}
    commits -= {f"commit.{round - 1:08d}" for round in anchors}
    if lost := commits - self._tags.keys():
      raise JobError(f"Commits were never there: {sorted(lost)}.")
    if other := [round for round, seen in anchors.items() if len(seen) > 1]:
      raise JobError(f"Anchors have other bits in the rounds {sorted(other)}.")
    if any(self.last_round(name) < final for name in self.living):
      raise JobError("An island ended before the last round.")
    ((_, error),) = anchors[final]
    return {
      "rounds": Measured(final, "rounds"),
      "islands": Measured(self._count, "islands"),
      "processes": Measured(self._count * self._processes, "processes"),
      "error": Measured(error, "x"),
    }


@contextlib.contextmanager
def _start_run(
  seed: int,
  islands: int,
  processes: int = 1,
  server: str = "",
  disk_bytes: int = 0,
) -> Iterator[Run]:
  """Starts islands, which end with the context, and waits for a round."""
  with contextlib.ExitStack() as stack:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    run = Run(folder, seed, processes, server)
    if disk_bytes:
      mount = ["mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "none"]
      if subprocess.run([*mount, run.store], capture_output=True).returncode:
        raise NoDiskError("A disk of its own cannot be mounted here.")
      unmount = ["umount", "-l", str(run.store)]
      stack.callback(lambda: subprocess.run(unmount))
    stack.callback(run.close)
    for _ in range(islands):
      run.add_island()
    run.wait_round(1)
    yield run


def kill_islands(
  kills: int, seed: int, *, islands: int = 4, processes: int = 1
) -> Metrics:
  """Kills islands at random times, and starts others in their place."""
  rng, trained = random.Random(seed), 0
  with _start_run(seed, islands, processes) as run:
    for _ in range(kills):
      before = run.newest_round()
      time.sleep(rng.uniform(0, 1))
      victim = rng.choice(sorted(run.living))
      trained += run.last_round(victim) >= 0  # Others were starting.
      run.kill_island(victim)
      run.add_island()
      # Nobody waits for the dead one longer than the grace.
      run.wait_newest(before + 1)
      if rng.random() < 0.5:
        run.wait_round(0)
    figures = run.finish()
  return {"of_islands_that_trained": Measured(trained, "kills"), **figures}


def pause_islands(pauses: int, seed: int, *, islands: int = 4) -> Metrics:
  """Stops islands until others have gone on, and lets them continue."""
  rng = random.Random(seed)
  with _start_run(seed, islands) as run:
    for _ in range(pauses):
      victim = rng.choice(sorted(run.living))
      (process,) = run.living[victim]
      os.kill(process.pid, signal.SIGSTOP)
      # The first round may have its change already.
      last = run.newest_round() + 2
      run.wait_newest(last)
      os.kill(process.pid, signal.SIGCONT)
      run.wait_round(last + 1)
    return run.finish()


def add_slow_islands(slow: int, seed: int, *, islands: int = 3) -> Metrics:
  """Adds islands whose steps take longer than a round."""
  with _start_run(seed, islands) as run:
    for _ in range(slow):
      run.add_island(_SLOW_STEP_S)
    return run.finish(_SLOW_ROUNDS)


def _train_alone(run: Run, take_away: Callable[[], None]) -> None:
  """Waits until each island has trained while its store was away."""
  for _ in range(_TRIES):
    take_away()
    before = run.newest_round()
    steps = {name: run.count_steps(name) for name in run.living}
    has_trained = lambda steps=steps: all(
      run.count_steps(name) >= count + _STEPS_AWAY
      for name, count in steps.items()
    )
    run.wait_for(has_trained)
    # What was sent before may have been decided.
    if run.newest_round() <= before + 1:
      return
  raise JobError("The store was not away.")


def stop_server(outages: int, seed: int, *, islands: int = 3) -> Metrics:
  """Stops the process of an S3 server again and again."""
  rng, port = random.Random(seed), find_free_port()
  (host,) = links.loopback_hosts(1)
  server = HostProcess(host, "moto.server", ["-p", str(port)], "server")
  try:
    with _start_run(seed, islands, server=f"127.0.0.1:{port}") as run:
      for _ in range(outages):
        time.sleep(rng.uniform(0, 1))
        _train_alone(run, lambda: os.kill(server.pid, signal.SIGSTOP))
        os.kill(server.pid, signal.SIGCONT)
        run.wait_round(run.newest_round() + 2)
      return run.finish()
  finally:
    server.kill()
    server.close()


def fill_disk(outages: int, seed: int, *, islands: int = 3) -> Metrics:
  """Fills the disk of the folder, and frees it, again and again."""
  rng = random.Random(seed)
  with _start_run(seed, islands, disk_bytes=_DISK_BYTES) as run:
    filling = run.store / "filling"

    def fill() -> None:
      """Appends to a file while there is room."""
      with contextlib.suppress(OSError), filling.open("ab", 0) as file:
        while file.write(bytes(512)):
          pass

    for _ in range(outages):
      time.sleep(rng.uniform(0, 1))
      _train_alone(run, fill)
      filling.unlink()
      run.wait_round(run.newest_round() + 2)
    return run.finish()


def forge_changes(forgeries: int, seed: int, *, islands: int = 3) -> Metrics:
  """Puts changes of other islands and rounds, and parts, into the folder."""
  rng, refused = random.Random(seed), 0
  with _start_run(seed, islands) as run:
    for i in range(forgeries):
      victim = rng.choice(sorted(run.living))
      round = run.newest_round()
      name = f"contribution.{round + 3:08d}"
      changes = sorted(run.store.glob(f"contribution.*.{victim}"))
      data = changes[-1].read_bytes()
      # As another island's, as that of another round, and a part of it.
      place, data = rng.choice(
        [("forger", data), (victim, data), ("forger", data[: len(data) // 2])]
      )
      (run.store / f"{name}.{place}").write_bytes(data)
      commit = run.store / f"commit.{round + 3:08d}"
      run.wait_for(commit.exists)
      header = commit.read_bytes()[10:-32]
      names = {
        key: [entry["island"] for entry in json.loads(header)[key]]
        for key in ("accepted", "refused")
      }
      if place in names["accepted"]:
        raise JobError(f"The forgery {i} was accepted.")
      refused += place in names["refused"]
    return {"refused": Measured(refused, "changes"), **run.finish()}


CASES: dict[str, tuple[Callable[..., Metrics], int, dict[str, int]]] = {
  "none": (kill_islands, 0, {}),
  "kills": (kill_islands, 100, {}),
  "job_kills": (kill_islands, 20, {"islands": 3, "processes": 2}),
  "pauses": (pause_islands, 20, {}),
  "slow": (add_slow_islands, 1, {}),
  "outages": (stop_server, 20, {}),
  "full_disk": (fill_disk, 20, {}),
  "forged": (forge_changes, 20, {}),
}
"""Function, number of faults and islands of each case."""

_CASES = list_flags.define_names("cases", CASES, CASES, "Cases to measure.")
_FAULTS = flags.DEFINE_integer("count", None, "Faults of each case.", 1)


def measure_case(name: str, seed: int, faults: int | None = None) -> Metrics:
  """Runs one case; returns its figures, or raises `JobError`."""
  measure, count, options = CASES[name]
  count = count if faults is None or not count else faults
  return {
    "faults": Measured(count, "faults"),
    **measure(count, seed, **options),
  }


def main() -> None:
  """Runs the cases, prints the table and writes rows."""
  printer = console.make_console()
  if "full_disk" in _CASES.value and os.geteuid():
    links.enter_user_namespace([sys.executable, *sys.orig_argv[1:]])
  # Processes end when their context is left, so SIGTERM must leave it.
  signals.exit_on_sigterm()
  cases: dict[str, Metrics] = {}
  rows: Sequence[records.Row] = ()
  for name, seed in itertools.product(_CASES.value, range(_SEEDS.value)):
    case = f"{name}/{seed}"
    printer.print(case)
    cases[case] = measure_case(name, seed, _FAULTS.value)
    rows = records.make_rows("islands_faults", cases)
    records.write_rows(_JSON.value, rows)
  printer.print(tables.summary_table(rows).to_console())


if __name__ == "__main__":
  shared_flags.run_main(main)
