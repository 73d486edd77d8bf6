import json
import os
import subprocess
import sys

import pytest

from experiments.common import workdir
from experiments.common.console import JobError
from experiments.common.workdir import Run, Workdir
from tests.paths import ROOT

RUN = Run(
  "int8",
  0,
  score=97.5,
  loss=0.1,
  wire_bytes=10,
  compiled_bytes=10,
  compile_s=1.0,
  step_ms=1.5,
)


def test_finished_runs_are_remembered(tmp_path, tiny):
  config = tiny("digits")
  Workdir(tmp_path, config).add_run(RUN)
  Workdir(tmp_path, config).add_run(RUN._replace(seed=1))
  assert Workdir(tmp_path, config).read_runs() == [RUN, RUN._replace(seed=1)]


def test_a_folder_of_another_configuration_is_refused(tmp_path, tiny):
  Workdir(tmp_path, tiny("digits"))
  other = tiny("digits", learning_rate=0.5, steps=9)
  with pytest.raises(ValueError, match=r"differs in learning_rate, steps\.$"):
    Workdir(tmp_path, other)


def test_more_seeds_and_exchanges_may_be_added(tmp_path, tiny):
  Workdir(tmp_path, tiny("digits", seeds=(0,))).add_run(RUN)
  wider = tiny("digits", seeds=(0, 1), exchanges=("int8",))
  assert Workdir(tmp_path, wider).read_runs() == [RUN]


def test_a_file_is_no_work_folder(tmp_path, tiny):
  path = tmp_path / "file"
  path.write_text("")
  for folder in (path, path / "inside"):
    with pytest.raises(
      JobError, match=r"`workdir` must be a folder, got .*file"
    ):
      Workdir(folder, tiny("digits"))


def test_a_folder_that_refuses_files_is_named(tiny):
  # Which refuses new names to root, too.
  with pytest.raises(JobError, match=r"can write to, got '/proc/self/none'"):
    Workdir("/proc/self/none", tiny("digits"))


@pytest.mark.parametrize("keep", [0, 40, -2])
def test_a_broken_configuration_is_refused_by_name(tmp_path, tiny, keep):
  Workdir(tmp_path, tiny("digits"))
  path = tmp_path / "config.json"
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(JobError, match=r"got '.*config.json', which is cut or"):
    Workdir(tmp_path, tiny("digits"))


def test_runs_without_a_configuration_are_refused(tmp_path, tiny):
  Workdir(tmp_path, tiny("digits")).add_run(RUN)
  (tmp_path / "config.json").unlink()
  with pytest.raises(JobError, match=r"must be empty or have the config.json"):
    Workdir(tmp_path, tiny("digits"))


def test_no_flipped_bit_gives_another_configuration_or_run(
  tmp_path, tiny, capsys
):
  config = tiny("digits")
  runs = [RUN, RUN._replace(seed=1)]
  for run in runs:
    Workdir(tmp_path, config).add_run(run)
  path = tmp_path / "runs.jsonl"
  whole = path.read_bytes()
  for bit in range(0, 8 * len(whole), 31):
    broken = bytearray(whole)
    broken[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(broken)
    found = Workdir(tmp_path, config).read_runs()
    said = capsys.readouterr().err
    assert found == runs or "its run is repeated" in said
    assert all(run in runs for run in found)


HOLD = """
import sys
from experiments.common.workdir import lock_folder
import pathlib
lock = lock_folder(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
  """Another process that holds the lock of `tmp_path`."""
  process = subprocess.Popen(
    [sys.executable, "-c", HOLD, str(tmp_path)],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  assert process.stdout.readline() == b"held\n"
  with process:
    yield process
    process.kill()


def test_the_other_job_on_a_folder_is_named_until_it_is_killed(
  tmp_path, tiny, holder, capsys
):
  with pytest.raises(
    JobError, match=f"which process {holder.pid} on host .* use"
  ):
    Workdir(tmp_path, tiny("digits"))
  holder.kill()
  holder.wait()
  workdir = Workdir(tmp_path, tiny("digits"))
  held = json.loads((tmp_path / "lock").read_text())
  assert held["process"] == os.getpid()
  assert capsys.readouterr().err == ""
  del workdir
  assert (tmp_path / "lock").read_text() == ""


def test_a_lock_of_another_host_is_taken_over_with_a_line(
  tmp_path, tiny, capsys
):
  (tmp_path / "lock").write_text('{"host": "far", "process": 7}\n')
  Workdir(tmp_path, tiny("digits"))
  assert "process 7 on host far is taken over" in capsys.readouterr().err


def test_where_no_locks_are_the_living_holder_is_refused(
  tmp_path, tiny, holder, monkeypatch
):
  def refuse(file, operation):
    raise OSError(workdir.errno.EOPNOTSUPP, "no locks here")

  monkeypatch.setattr(workdir.fcntl, "flock", refuse)
  with pytest.raises(JobError, match=f"which process {holder.pid} on host"):
    Workdir(tmp_path, tiny("digits"))
  holder.kill()
  holder.wait()
  Workdir(tmp_path, tiny("digits"))
