"""The call for a GPU machine, in its small form on this device."""

import pytest
from absl.testing import flagsaver

from experiments.common import records, signals
from experiments.gpu import __main__ as command, jobs
from experiments.kernels import cases


@pytest.fixture(autouse=True)
def own_signals(monkeypatch):
  monkeypatch.setattr(signals, "exit_on_sigterm", lambda: None)


def test_jobs_write_rows_as_they_end_and_are_not_run_twice(tmp_path, run_main):
  (*rows, end), said = run_main(command.main, jobs=["transfers"], small=True)
  assert "transfers" in said
  units = {(row.experiment, row.metric): row.unit for row in rows}
  assert units["gpu_transfers", "bandwidth"] == "GB/s"
  assert (end.metric, end.case) == (jobs.SECONDS, "transfers")
  assert jobs.read_known(tmp_path / "rows.jsonl") == [*rows, end]
  assert list(jobs.run_jobs(["transfers"], [*rows, end], 60, True)) == []


def test_each_op_is_checked_by_one_of_several_processes(monkeypatch):
  commands = []
  monkeypatch.setattr(
    jobs, "_run_command", lambda command, seconds: commands.append(command)
  )
  jobs._run_job("check", 60.0, small=False)
  dealt = [
    c.removeprefix("--ops=")
    for each in commands
    for c in each
    if c.startswith("--ops=")
  ]
  names = [name for part in dealt for name in part.split(",")]
  assert len(dealt) > 1 and sorted(names) == sorted(cases.list_ops())


def test_jobs_that_fail_or_find_no_time_are_run_by_the_next_call(tmp_path):
  path = tmp_path / "rows.jsonl"
  with flagsaver.flagsaver(json=str(path), seconds=1.0, jobs=["speed"]):
    with pytest.raises(SystemExit, match="1"):
      command.main()
  (row,) = records.read_rows(path)
  assert (row.case, row.value) == ("speed", "not measured: no time left")
  failed = row._replace(case="check", value="failed: it said nothing")
  ended = row._replace(case="transfers", value=3.0)
  rate = row._replace(experiment="gpu_transfers", case="x", metric="bandwidth")
  part = rate._replace(experiment="gpu_check")
  known = [row, part, failed, rate, ended]
  records.write_rows(path, known)
  assert jobs.read_known(path) == known
  names = ["check", "transfers"]
  (rows,) = jobs.run_jobs(names, known, seconds=1.0, small=True)
  assert rows == [row, rate, ended, failed._replace(value=row.value)]
  assert jobs.read_known(tmp_path / "absent.jsonl") == []
