import io
import types

import pytest
import rich.console
from ml_collections import ConfigDict
from PIL import Image

from experiments.common.checkpoint import Run
from experiments.train import report

CONFIG = ConfigDict({"experiment": "digits"})
TASK = types.SimpleNamespace(
  metric="test_accuracy", unit="%", facts=(("corpus_sha256", "ab", "hex"),)
)
RUNS = [
  Run(
    "fp32",
    0,
    score=98.0,
    loss=0.1,
    wire_bytes=1_000_000,
    compiled_bytes=1_000_000,
    compile_s=1.0,
    step_ms=4.0,
  ),
  Run(
    "fp32",
    1,
    score=97.0,
    loss=0.3,
    wire_bytes=1_000_000,
    compiled_bytes=1_000_000,
    compile_s=1.0,
    step_ms=6.0,
  ),
  Run(
    "int8",
    0,
    score=97.0,
    loss=0.2,
    wire_bytes=250_000,
    compiled_bytes=250_000,
    compile_s=1.0,
    step_ms=5.0,
  ),
  Run(
    "int8",
    1,
    score=97.0,
    loss=0.2,
    wire_bytes=250_000,
    compiled_bytes=250_000,
    compile_s=1.0,
    step_ms=5.5,
  ),
]


def summarised(runs=RUNS):
  rows = report.summarise(CONFIG, TASK, runs)
  return rows, {(row.case, row.metric): row for row in rows}


def printed(rows):
  console = rich.console.Console(file=io.StringIO(), width=140)
  console.print(report.make_table(rows, "test_accuracy"))
  return console.file.getvalue()


def test_scores_are_means_with_their_spread_and_baseline():
  _, cells = summarised()
  fp32 = cells["fp32", "test_accuracy"]
  assert fp32.value == 97.5
  assert fp32.noise == pytest.approx(0.5**0.5)
  int8 = cells["int8", "test_accuracy"]
  assert int8.baseline == 97.5
  assert int8.ratio == pytest.approx(97 / 97.5)
  assert int8.noise == 0


def test_wire_ratio_is_bytes_of_fp32_over_bytes():
  _, cells = summarised()
  assert cells["fp32", "wire_ratio"].value == 1
  assert cells["int8", "wire_ratio"].value == 4


def test_link_times_are_bits_over_speed_and_say_so():
  _, cells = summarised()
  assert cells["fp32", "exchange_ms_100mbit"].value == pytest.approx(80)
  assert cells["fp32", "exchange_ms_1gbit"].value == pytest.approx(8)
  assert cells["int8", "exchange_ms_10gbit"].value == pytest.approx(0.2)
  assert "computed" in cells["int8", "exchange_ms_10gbit"].unit
  assert "computed" in printed(summarised()[0])


def test_facts_become_rows():
  _, cells = summarised()
  assert cells["data", "corpus_sha256"].value == "ab"


def test_table_shows_every_exchange_and_its_distance():
  text = printed(summarised()[0])
  for part in ("fp32", "int8", "97.50 ± 0.71", "-0.50", "250,000", "4.00"):
    assert part in text


def test_a_job_without_baseline_has_no_ratios():
  rows, cells = summarised(RUNS[2:])
  assert ("int8", "wire_ratio") not in cells
  assert cells["int8", "test_accuracy"].baseline is None
  assert "int8" in printed(rows)


def test_one_seed_has_no_spread():
  _, cells = summarised(RUNS[::2])
  assert cells["int8", "test_accuracy"].noise is None


def test_plot_is_an_image_with_something_in_it(tmp_path):
  path = tmp_path / "new" / "plot.png"
  report.save_plot(summarised()[0], "test_accuracy", path)
  with Image.open(path) as image:
    assert image.size == (1050, 675)
    assert len(set(image.convert("L").resize((100, 100)).tobytes())) > 10
