import os
import subprocess
import sys

from experiments.common import records
from jaxmotion import perfmodel
from tests.paths import ROOT

WAIT_S = 120
SMALL = [
  "--known_widths=8,16",
  "--known_batches=2,4",
  "--shapes=12x4",
  "--exchanges=none,fp32,sign_feedback",
  "--rounds=1",
  "--steps=1",
  "--sizes=2",
  "--largest=8192",
  "--between=",
]


def run(*flags):
  kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.run(
    [sys.executable, "-m", "experiments.perfmodel.validate", *SMALL, *flags],
    cwd=ROOT,
    env=kept,
    capture_output=True,
    text=True,
    timeout=WAIT_S,
  )


def test_a_small_run_calibrates_measures_and_scores(tmp_path):
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  folder = tmp_path / "platforms"
  done = run(
    "--emulated=2",
    "--rates=loopback",
    f"--json={json}",
    f"--plot={plot}",
    f"--platforms={folder}",
  )
  assert done.returncode == 0, done.stderr
  rows = records.read_rows(json)
  assert {row.experiment for row in rows} == {
    "perfmodel_validate_emulated2",
    "perfmodel_validate_hosts2_loopback",
    "perfmodel_validate_all",
  }
  steps = [row for row in rows if row.metric == "predicted_step_ms"]
  assert len(steps) == 2 * 3
  for row in steps:
    assert row.value > 0 and row.baseline > 0
  metrics = {row.metric for row in rows}
  assert {"mape", "bias", "decision_accuracy", "regret"} <= metrics
  assert plot.read_bytes().startswith(b"\x89PNG")
  emulated = perfmodel.load_platform(folder / "emulated2.json")
  assert "emulated" in emulated.sources["device.call_s"]
  hosts = perfmodel.load_platform(folder / "hosts2_loopback.json")
  assert "all_gather 2" in hosts.axis("data").link.measured
  assert "Which exchange is the fastest" in done.stdout


def test_a_shape_that_is_none_is_named():
  done = run("--shapes=12", "--emulated=2", "--rates=")
  assert done.returncode != 0
  assert "`--shapes` must be WIDTHxBATCH, got '12'." in done.stderr
