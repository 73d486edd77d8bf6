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


FIELDS = "experiment case metric value unit baseline ratio noise machine jax"


def test_rows_come_back_as_they_were_and_a_failed_write_leaves_them(tmp_path):
  path = tmp_path / "new" / "rows.jsonl"
  rows = [ROW, ROW._replace(case="fp32", value="text")]
  records.write_rows(path, rows)
  lines = path.read_text().splitlines()
  # Each line is one JSON object with the shared fields.
  assert [list(json.loads(line)) for line in lines] == 2 * [FIELDS.split()]

  def broken():
    yield ROW._replace(case="other")
    raise OSError("disk is full")

  with pytest.raises(OSError, match="disk is full"):
    records.write_rows(path, broken())
  assert records.read_rows(path) == rows


def test_an_absent_file_has_no_lines_but_is_no_file_of_rows(tmp_path):
  path = tmp_path / "rows.jsonl"
  assert records.read_lines(path) == []
  with pytest.raises(FileNotFoundError, match=r"rows.jsonl' must exist"):
    records.read_rows(path)
  path.touch()
  assert records.read_rows(path) == []


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
    '{"case": [{"b": 1, "b": 1}]}',
    b"\xff\xfe",
  ],
)
def test_lines_that_are_no_rows_are_refused(tmp_path, line):
  path = tmp_path / "rows.jsonl"
  where = r"rows.jsonl' line 1 must"
  if isinstance(line, bytes):
    line, where = line.decode("latin1"), r"rows.jsonl' must be UTF-8 text"
  text = line + "\n" + json.dumps(ROW._asdict()) + "\n"
  path.write_bytes(text.encode("latin1"))
  with pytest.raises(FileError, match=where) as caught:
    records.read_rows(path)
  assert "\n" not in str(caught.value)
