"""Processes of islands that are killed at random and come back."""

import os
import random
import subprocess
import sys
import time

import pytest

from tests.paths import ROOT
from tests.processes import environment

# The run by hand: JAXMOTION_KILLS=100.
KILLS = int(os.environ.get("JAXMOTION_KILLS", "10"))
ISLANDS = 4
# A run without kills ends at 0.04. It begins at 1.
MAX_ERROR = 0.1


class Run:
  """Islands of one folder, each a process."""

  def __init__(self, folder):
    self.folder, self.living, self.count = folder, {}, 0
    self.finish = folder / "finish"

  def add_island(self):
    name = f"island{self.count}"
    self.count += 1
    log = self.folder / f"{name}.log"
    log.touch()
    command = [sys.executable, "-m", "tests.islands.worker"]
    command += map(str, [self.folder / "run", name, log, self.finish])
    self.living[name] = subprocess.Popen(command, cwd=ROOT, env=environment())

  def read_rounds(self, name):
    """Returns (round, checksum, error) of what an island has seen."""
    lines = (self.folder / f"{name}.log").read_text().splitlines()
    rows = [line.split() for line in lines]
    return [(int(row[0]), row[1], float(row[2])) for row in rows if row[2:]]

  def last_round(self, name):
    return max([row[0] for row in self.read_rounds(name)], default=-1)

  def wait_for(self, is_done, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_done():
      assert time.monotonic() < deadline, "the islands stopped"
      for name, process in self.living.items():
        assert process.poll() in (None, 0), f"{name} ended by itself"
      time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_islands_train_on_whoever_is_killed(tmp_path):
  rng, run, started = random.Random(0), Run(tmp_path), time.monotonic()
  trained = 0  # Of those killed; others were starting.
  for _ in range(ISLANDS):
    run.add_island()
  run.wait_for(lambda: all(run.last_round(n) >= 1 for n in run.living))
  for _ in range(KILLS):
    before = max(map(run.last_round, run.living))
    time.sleep(rng.uniform(0, 1))
    victim = rng.choice(sorted(run.living))
    trained += run.last_round(victim) >= 0
    process = run.living.pop(victim)
    process.kill()
    process.wait()
    run.add_island()
    # Nobody waits for the dead one longer than the grace.
    run.wait_for(lambda b=before: max(map(run.last_round, run.living)) > b)
    if rng.random() < 0.5:
      newest = f"island{run.count - 1}"
      run.wait_for(lambda n=newest: run.last_round(n) >= 0)
  run.wait_for(lambda: all(run.last_round(n) >= 0 for n in run.living))
  final = max(map(run.last_round, run.living)) + 100
  part = run.finish.with_suffix(".part")
  part.write_text(str(final))
  part.rename(run.finish)
  run.wait_for(lambda: all(p.poll() == 0 for p in run.living.values()), 600)
  rounds = {}
  for name in (f"island{i}" for i in range(run.count)):
    for round, checksum, error in run.read_rounds(name):
      rounds.setdefault(round, set()).add((checksum, error))
  # Every round has one anchor, whoever saw it, and none is missing.
  assert {round: len(seen) for round, seen in rounds.items()} == dict.fromkeys(
    range(final + 1), 1
  )
  assert {run.last_round(name) for name in run.living} == {final}
  ((_, error),) = rounds[final]
  print(
    f"{KILLS} kills, {trained} of islands that trained, {final} rounds, "
    f"{run.count} processes, error {error}, "
    f"{time.monotonic() - started:.0f} s, "
    f"{len(os.listdir(tmp_path / 'run'))} objects at the end"
  )
  assert error < MAX_ERROR
