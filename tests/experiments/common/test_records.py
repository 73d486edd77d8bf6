import json

from experiments.common import records

ROW = records.Row(
  experiment="digits",
  case="int8",
  metric="step_ms",
  value=4.25,
  unit="ms",
  baseline=4.0,
  ratio=1.0625,
  noise=None,
  machine="somewhere",
  jax="0.0",
)


def test_rows_come_back_as_they_were(tmp_path):
  path = tmp_path / "new" / "rows.jsonl"
  rows = [ROW, ROW._replace(case="fp32", value="text")]
  records.write_rows(path, rows)
  assert records.read_rows(path) == rows


def test_each_line_is_one_json_object_with_the_shared_fields(tmp_path):
  path = tmp_path / "rows.jsonl"
  records.write_rows(path, [ROW, ROW])
  lines = path.read_text().splitlines()
  assert len(lines) == 2
  assert list(json.loads(lines[0])) == [
    "experiment",
    "case",
    "metric",
    "value",
    "unit",
    "baseline",
    "ratio",
    "noise",
    "machine",
    "jax",
  ]


def test_a_failed_write_leaves_the_old_file(tmp_path):
  path = tmp_path / "rows.jsonl"
  records.write_rows(path, [ROW])

  def broken():
    yield ROW._replace(case="other")
    raise OSError("disk is full")

  try:
    records.write_rows(path, broken())
  except OSError:
    assert records.read_rows(path) == [ROW]
  else:
    raise AssertionError("the error was swallowed")


def test_an_absent_file_has_no_rows(tmp_path):
  assert records.read_rows(tmp_path / "rows.jsonl") == []


def test_machine_is_described():
  assert "cores" in records.describe_machine()
  assert "cpu" in records.describe_machine()
