import types

import pytest
from ml_collections import ConfigDict

from experiments.common.workdir import Run
from experiments.train.rows import make_rows, summary_table

CONFIG = ConfigDict({"experiment": "digits"})
TASK = types.SimpleNamespace(
  metric="test_accuracy", unit="%", facts=(("corpus_sha256", "ab", "hex"),)
)
FP32 = Run("fp32", 0, 98.0, 0.1, 1_000_000, 1_000_000, 1.0, step_ms=4.0)
INT8 = Run("int8", 0, 97.0, 0.2, 250_000, 250_000, 1.0, step_ms=5.0)
RUNS = [
  FP32,
  FP32._replace(seed=1, score=97.0, loss=0.3, step_ms=6.0),
  INT8,
  INT8._replace(seed=1, step_ms=5.5),
]


def summarized(runs=RUNS):
  rows = make_rows(CONFIG, TASK, runs)
  return rows, {(row.case, row.metric): row for row in rows}


# What the table shows of rows: test_tables.py.
def test_rows_are_means_with_spread_ratios_bytes_and_link_times():
  _, cells = summarized()
  fp32 = cells["fp32", "test_accuracy"]
  assert fp32.value == 97.5 and fp32.noise == pytest.approx(0.5**0.5)
  int8 = cells["int8", "test_accuracy"]
  assert (int8.baseline, int8.noise) == (97.5, 0)
  assert int8.ratio == pytest.approx(97 / 97.5)
  ratios = [cells[case, "wire_ratio"].value for case in ("fp32", "int8")]
  assert ratios == [1, 4]  # Bytes of fp32 over bytes.
  assert cells["fp32", "exchange_ms_100mbit"].value == pytest.approx(80)
  assert cells["fp32", "exchange_ms_1gbit"].value == pytest.approx(8)
  assert cells["int8", "exchange_ms_10gbit"].value == pytest.approx(0.2)
  assert "computed" in cells["int8", "exchange_ms_10gbit"].unit
  assert cells["data", "corpus_sha256"].value == "ab"


def test_a_job_without_baseline_has_no_ratios():
  rows, cells = summarized(RUNS[2:3])
  assert ("int8", "wire_ratio") not in cells
  row = cells["int8", "test_accuracy"]  # Nor has one seed a spread.
  assert row.baseline is row.ratio is row.noise is None
  (line,) = summary_table(rows).lines
  assert line[0] == "int8"
