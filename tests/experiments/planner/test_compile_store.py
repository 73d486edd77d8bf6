"""Compiled bytes are kept by the text of the program."""

import jax
import pytest

from experiments.common import records
from experiments.common.console import JobError
from experiments.planner.compile_store import CompileStore
from experiments.residuals.cases import StepProgram


def test_a_program_is_compiled_once_whatever_plan_it_comes_from(tmp_path):
  path = tmp_path / "folder" / "known.jsonl"
  x = jax.ShapeDtypeStruct((256,), "float32")
  double, again, other = (
    StepProgram(fn, (x,))
    for fn in (lambda x: 2 * x, lambda y: 2 * y, lambda x: x[:64])
  )
  store = CompileStore("cpu", path)
  first, same, less = map(store.compile, (double, again, other))
  assert first.device_bytes == 2 * x.size * 4
  assert less.device_bytes == (x.size + 64) * 4
  assert same == first and store.known_s == first.compile_s > 0
  assert store.count == 3 and len(path.read_text().splitlines()) == 2
  # Another run reads what this one has written.
  later = CompileStore("cpu", path)
  assert later.compile(double) == first and later.compile(other) == less
  assert len(path.read_text().splitlines()) == 2


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / "known.jsonl"
  x = jax.ShapeDtypeStruct((8,), "float32")
  store = CompileStore("cpu", path)
  store.compile(StepProgram(lambda x: 2 * x, (x,)))
  before = path.read_text()
  sync = records.os.fsync

  def fill_disk(number):
    sync(number)
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(records.os, "fsync", fill_disk)
  with pytest.raises(OSError, match="No space left"):
    store.compile(StepProgram(lambda x: 3 * x, (x,)))
  assert path.read_text() == before


def test_a_file_of_something_else_is_refused(tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_text('{"case": "gpt"}\n')
  with pytest.raises(JobError, match="must hold what .* got a line of case"):
    CompileStore("cpu", path)
