import json
import os
import subprocess
import sys

import pytest

from experiments.common import workdir
from experiments.common.console import JobError
from experiments.common.workdir import Run, Workdir
from tests.paths import ROOT

RUN = Run("int8", 0, 97.5, 0.1, 10, 10, 1.0, step_ms=1.5)


def test_finished_runs_are_remembered_and_others_may_be_added(tmp_path, tiny):
  config = tiny("digits", seeds=(0,))
  Workdir(tmp_path, config).add_run(RUN)
  Workdir(tmp_path, config).add_run(RUN._replace(seed=1))
  wider = tiny("digits", seeds=(0, 1), exchanges=("int8",))
  assert Workdir(tmp_path, wider).read_runs() == [RUN, RUN._replace(seed=1)]


def test_a_folder_of_another_configuration_is_refused(tmp_path, tiny):
  Workdir(tmp_path, tiny("digits"))
  other = tiny("digits", learning_rate=0.5, steps=9)
  with pytest.raises(ValueError, match=r"differs in learning_rate, steps\.$"):
    Workdir(tmp_path, other)


def test_a_folder_that_takes_no_files_is_named(tmp_path, tiny):
  path = tmp_path / "file"
  path.write_text("")
  no_folder = r"`workdir` must be a folder, got .*file"
  for folder, message in {
    path: no_folder,
    path / "inside": no_folder,
    # Which refuses new names to root, too.
    "/proc/self/none": r"can write to, got '/proc/self/none'",
  }.items():
    with pytest.raises(JobError, match=message):
      Workdir(folder, tiny("digits"))


def test_runs_without_a_whole_configuration_are_refused(tmp_path, tiny):
  config = tiny("digits")
  Workdir(tmp_path, config).add_run(RUN)
  path = tmp_path / "config.json"
  whole = path.read_bytes()
  for keep in (0, 40, -2):
    path.write_bytes(whole[:keep])
    with pytest.raises(JobError, match=r"got '.*config.json', which is cut or"):
      Workdir(tmp_path, config)
  path.unlink()
  with pytest.raises(JobError, match=r"must be empty or have the config.json"):
    Workdir(tmp_path, config)


def test_a_broken_line_is_left_out_and_named(tmp_path, tiny, capsys):
  config = tiny("digits")
  Workdir(tmp_path, config).add_run(RUN)
  Workdir(tmp_path, config).add_run(RUN._replace(seed=1))
  path = tmp_path / "runs.jsonl"
  path.write_bytes(path.read_bytes().replace(b"97.5", b"97.6", 1))
  assert Workdir(tmp_path, config).read_runs() == [RUN._replace(seed=1)]
  said = capsys.readouterr().err
  assert "Line 1 of" in said and "its run is repeated" in said


HOLD = """
import sys
from experiments.common.workdir import lock_folder
import pathlib
lock = lock_folder(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_other_job_on_a_folder_is_named_until_it_is_killed(
  tmp_path, tiny, capsys, monkeypatch
):
  def refuse(file, operation):
    raise OSError(workdir.errno.EOPNOTSUPP, "no locks here")

  process = subprocess.Popen(
    [sys.executable, "-c", HOLD, str(tmp_path)],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  has_locks, has_none = workdir.fcntl.flock, refuse
  with process:
    assert process.stdout.readline() == b"held\n"
    for flock in (has_locks, has_none):
      monkeypatch.setattr(workdir.fcntl, "flock", flock)
      with pytest.raises(
        JobError, match=f"which process {process.pid} on host .* use"
      ):
        Workdir(tmp_path, tiny("digits"))
    process.kill()
  for flock in (has_none, has_locks):
    monkeypatch.setattr(workdir.fcntl, "flock", flock)
    ours = Workdir(tmp_path, tiny("digits"))
    held = json.loads((tmp_path / "lock").read_text())
    assert held["process"] == os.getpid()
    del ours
    assert (tmp_path / "lock").read_text() == ""
  assert capsys.readouterr().err == ""


def test_a_lock_of_another_host_is_taken_over_with_a_line(
  tmp_path, tiny, capsys
):
  (tmp_path / "lock").write_text('{"host": "far", "process": 7}\n')
  Workdir(tmp_path, tiny("digits"))
  assert "process 7 on host far is taken over" in capsys.readouterr().err
