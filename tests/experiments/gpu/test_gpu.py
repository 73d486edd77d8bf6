"""The call for a GPU machine, in its small form on this device."""

from experiments.common import records
from experiments.gpu import jobs
from tests.experiments.jobs import run_module

JOBS = ("transfers", "plans_gpt")


def call(path, *flags):
  return run_module("gpu", f"--json={path}", *flags)


def test_jobs_write_rows_as_they_end_and_are_not_run_twice(tmp_path):
  path = tmp_path / "rows.jsonl"
  done = call(path, "--small", f"--jobs={','.join(JOBS)}")
  assert done.returncode == 0, done.stderr
  rows = records.read_rows(path)
  units = {(row.experiment, row.metric): row.unit for row in rows}
  assert units["gpu_transfers", "bandwidth"] == "GB/s"
  assert units["gpu_plans_gpt", "step_ms"] == "ms"
  ends = [row.case for row in rows if row.metric == jobs.SECONDS]
  assert ends == list(JOBS)
  plans = {row.case for row in rows if row.metric == "step_ms"}
  assert {"mlp_gelu/plain", "mlp_gelu/ours", "mlp_gelu/ours_host"} <= plans
  lines = jobs.summary_table(rows).lines
  assert len(lines) == len(rows) - len(JOBS)
  assert "plans_gpt" in done.stdout
  again = call(path, "--small", f"--jobs={','.join(JOBS)}")
  assert again.returncode == 0 and "are left" not in again.stderr
  assert records.read_rows(path) == rows


def test_jobs_that_fail_or_find_no_time_are_run_by_the_next_call(tmp_path):
  path = tmp_path / "rows.jsonl"
  done = call(path, "--seconds=1", "--jobs=speed")
  assert done.returncode == 1
  (row,) = records.read_rows(path)
  assert (row.case, row.value) == ("speed", "not measured: no time left")
  failed = row._replace(case="check", value="failed: it said nothing")
  ended = row._replace(case="transfers", value=3.0)
  rate = row._replace(experiment="gpu_transfers", case="x", metric="bandwidth")
  part = rate._replace(experiment="gpu_check")
  records.write_rows(path, [row, part, failed, rate, ended])
  assert jobs.read_known(path) == [rate, ended]
  assert jobs.read_known(tmp_path / "absent.jsonl") == []
