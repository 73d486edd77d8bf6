import io
import types

import pytest
import rich.console
from ml_collections import ConfigDict
from PIL import Image

from experiments.common.workdir import Run
from experiments.train import plot as train_plot
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


def printed(rows):
  console = rich.console.Console(file=io.StringIO(), width=140)
  console.print(summary_table(rows).to_console())
  return console.file.getvalue()


def test_rows_are_means_with_spread_ratios_bytes_and_link_times():
  rows, cells = summarized()
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
  text = printed(rows)
  for part in ("fp32", "int8", "97.50 ± 0.71", "-0.50", "250,000", "4.00"):
    assert part in text
  assert "computed" in text


def test_a_job_without_baseline_has_no_ratios():
  rows, cells = summarized(RUNS[2:3])
  assert ("int8", "wire_ratio") not in cells
  row = cells["int8", "test_accuracy"]  # Nor has one seed a spread.
  assert row.baseline is row.ratio is row.noise is None
  assert "int8" in printed(rows)


def test_plot_is_an_image_with_something_in_it(tmp_path):
  path = tmp_path / "new" / "plot.png"
  train_plot.save_plot(summarized()[0], path)
  with Image.open(path) as image:
    assert image.size == (1400, 900)
    assert len(set(image.convert("L").resize((100, 100)).tobytes())) > 10
