import io
import math
import re
import sys
import types
import typing

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from experiments.common.checkpoint import Log
from experiments.common.console import JobError
from experiments.common.loop import run_cases, run_steps
from experiments.common.progress import Display, ScalarWriter


class MemoryStore:
  """Keeps the last checkpoint in memory."""

  saved = None

  def save(self, state, log, layout):
    assert layout is None
    self.saved = state, Log(list(log.loss), list(log.step_ms))

  def restore(self, state, elastic):
    return self.saved or (state, Log([], []))


def add(state, batch):
  return state + batch, float(batch)


def test_a_resumed_run_ends_where_a_straight_one_does():
  options = {"steps": 5, "checkpoint_every": 2}
  straight, log = run_steps(0, add, lambda i: i, **options)
  store = MemoryStore()
  run_steps(0, add, lambda i: i, store=store, stop=3, **options)
  seen = []
  resumed, resumed_log = run_steps(
    0,
    add,
    lambda i: i,
    store=store,
    on_step=lambda *a: seen.append((*a, store.saved[0])),
    **options,
  )
  assert straight == resumed == 0 + 1 + 2 + 3 + 4
  assert log.loss == resumed_log.loss == [0, 1, 2, 3, 4]
  # Steps since the last checkpoint are done again.
  assert seen == [(3, 2.0, 1), (4, 3.0, 6), (5, 4.0, 10)]
  assert store.saved[0] == straight  # The last step has a checkpoint.


def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint():
  store = MemoryStore()

  def evaluate(done, state):
    state[1] += 10 * done  # An evaluation is part of the checkpoint.

  state, log = run_steps(
    np.zeros(2),
    lambda state, batch: (state + np.array([batch, 0]), batch),
    lambda i: [1.0, 2.0, math.inf, 4.0][i],
    steps=4,
    checkpoint_every=1,
    store=store,
    evaluate=evaluate,
  )
  assert log.loss == [1.0, 2.0, math.inf] and math.isinf(state[0])
  assert store.saved[0].tolist() == [3.0, 30]


def test_every_case_runs_with_every_seed_seeds_first():
  runs = run_cases(
    ("a", "b"),
    (0, 1),
    lambda case, seed, store, on_step: (case, seed),
    lambda run: (0.0, 0.0),
  )
  assert runs == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def shown(terminal):
  console = rich.console.Console(
    file=io.StringIO(), force_terminal=terminal, width=100
  )
  with Display(console, steps=8, runs=1) as display:
    on_step = display.begin_run("int8", 1)
    for done in range(1, 9):
      on_step(done, 1 / done)
    display.end_run("int8", 1, score=97.5, step_ms=4.0)
  return console.file.getvalue()


def test_plain_output_is_a_few_lines_without_control_codes():
  lines = shown(terminal=False).strip().splitlines()
  assert lines == [
    "int8 seed 1  loss 0.5000  step 2/8",
    "int8 seed 1  loss 0.2500  step 4/8",
    "int8 seed 1  loss 0.1667  step 6/8",
    "int8 seed 1  loss 0.1250  step 8/8",
    "int8 seed 1: score 97.500, step 4.0 ms",
  ]


def test_terminal_has_a_live_table_and_a_bar_that_ends_full():
  text = shown(terminal=True)
  assert "\x1b[" in text
  plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
  row = [r for r in plain.splitlines() if r.startswith("int8 seed 1 ")][-2]
  assert row.split() == "int8 seed 1 8 0.1250 97.500 4.0".split()
  last = text.rsplit("int8 seed 1  loss", 1)[1]
  assert "8/8" in last


class Events:
  """Keeps what a writer of event files is told."""

  made: typing.ClassVar[list] = []

  def __init__(self, folder, purge_step):
    self.told = [("open", folder, purge_step)]
    Events.made.append(self)

  def add_scalar(self, *scalar):
    self.told.append(scalar)

  def close(self):
    self.told.append(("close",))


@pytest.fixture
def events(monkeypatch):
  package = types.SimpleNamespace(SummaryWriter=Events)
  monkeypatch.setitem(sys.modules, "tensorboardX", package)
  Events.made = []
  return Events.made


def test_a_resumed_run_hides_steps_that_it_repeats(tmp_path, events):
  writer = ScalarWriter(tmp_path / "int8-seed0")
  writer.write(50, {"loss": 0.5, "step": jnp.int32(50)})
  writer.write(60, {"loss": 0.25})
  writer.close()
  (file,) = events
  assert file.told == [
    ("open", str(tmp_path / "int8-seed0"), 50),
    ("loss", 0.5, 50),
    ("step", 50.0, 50),
    ("loss", 0.25, 60),
    ("close",),
  ]
  assert all(type(told[1]) is float for told in file.told[1:-1])


def test_other_processes_and_runs_without_steps_write_nothing(tmp_path, events):
  quiet = ScalarWriter(tmp_path, is_quiet=True)
  quiet.write(1, {"loss": 0.5})
  quiet.close()
  ScalarWriter(tmp_path).close()
  assert not events


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  with pytest.raises(JobError, match="pip install tensorboardX"):
    ScalarWriter(tmp_path)
