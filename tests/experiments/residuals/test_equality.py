import subprocess
import sys

import pytest

from experiments.common import records
from experiments.residuals import equality, points

TINY = "resnet:2:blocks=[1,2,1,1]:image=32:width=0.0625:classes=5"


def test_the_lossless_cut_is_as_near_to_float64_as_plain_training():
  (spec,) = points.parse([TINY])
  rows = list(equality.compare(spec, ["plain", "cut", "cut_int8"]))
  found = {(r.case.rpartition("/")[2], r.metric): r for r in rows}
  assert 0 < found["plain", "gradient_error"].value < 1e-3
  assert found["cut", "gradient_error"].ratio == pytest.approx(1, abs=0.1)
  assert found["cut", "gradient_from_plain"].value < 1e-5
  assert found["cut", "gradient_error_float64"].value < 1e-12
  assert 1e-3 < found["cut_int8", "gradient_error"].value < 0.1
  assert found["cut_int8", "values_equal"].value < 1


def test_the_runner_prints_a_table_and_writes_rows(tmp_path):
  path = tmp_path / "rows.jsonl"
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "experiments.residuals.equality",
      "--networks=squeezenet:1:image=32:width=0.125:classes=5",
      "--modes=plain,cut",
      f"--json={path}",
    ],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert "gradients of the first step" in done.stdout
  assert len(records.read_rows(path)) == 1 + 4


def test_modes_that_do_not_begin_with_plain_are_refused():
  done = subprocess.run(
    [sys.executable, "-m", "experiments.residuals.equality", "--modes=cut"],
    capture_output=True,
    text=True,
  )
  assert done.returncode != 0
  assert "`--modes` must begin with plain" in done.stderr
