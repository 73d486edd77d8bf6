"""Tests of the scalars that runners write."""

import sys
import types
import typing

import jax.numpy as jnp
import pytest

from experiments.common.console import JobError
from experiments.common.scalars import ScalarWriter


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
