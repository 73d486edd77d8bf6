import json

import pytest

from experiments.common import records
from experiments.common.files import FileError

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


def test_an_absent_file_has_no_lines_but_is_no_file_of_rows(tmp_path):
  path = tmp_path / "rows.jsonl"
  assert records.read_lines(path) == []
  with pytest.raises(FileNotFoundError, match=r"rows.jsonl' must exist"):
    records.read_rows(path)
  path.touch()
  assert records.read_rows(path) == []


def test_every_cut_inside_a_line_is_refused_and_names_the_line(tmp_path):
  path = tmp_path / "rows.jsonl"
  records.write_rows(path, [ROW, ROW._replace(case="fp32")])
  whole = path.read_bytes()
  first = whole.index(b"\n") + 1
  for length in range(first + 1, len(whole) - 1):
    path.write_bytes(whole[:length])
    with pytest.raises(FileError, match=r"rows.jsonl' line 2 must be"):
      records.read_rows(path)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("experiment", 3),
    ("case", None),
    ("value", None),
    ("value", True),
    ("value", [1.0]),
    ("baseline", "4"),
    ("noise", {}),
  ],
)
def test_fields_of_other_types_are_refused(tmp_path, field, value):
  path = tmp_path / "rows.jsonl"
  records.write_lines(path, [ROW._asdict(), ROW._asdict() | {field: value}])
  with pytest.raises(FileError, match=rf"rows.jsonl' line 2: `{field}` must"):
    records.read_rows(path)


@pytest.mark.parametrize(
  "line",
  [
    "[1]",
    "{}",
    "3",
    "",
    "[" * 100_000,
    json.dumps(ROW._asdict() | {"more": 1}),
    json.dumps(ROW._asdict())[:-1] + ', "value": 5.0}',
  ],
)
def test_lines_that_are_no_rows_are_refused(tmp_path, line):
  path = tmp_path / "rows.jsonl"
  path.write_text(line + "\n" + json.dumps(ROW._asdict()) + "\n")
  with pytest.raises(FileError, match=r"rows.jsonl' line 1 must") as caught:
    records.read_rows(path)
  assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_bytes(b"\xff\xfe")
  with pytest.raises(FileError, match=r"rows.jsonl' must be UTF-8 text"):
    records.read_rows(path)


def test_machine_is_described():
  assert "cores" in records.describe_machine()
  assert "cpu" in records.describe_machine()
