import os
import subprocess
import sys

import pytest

from experiments.common import records
from experiments.weights import run
from tests.paths import ROOT

WAIT_S = 240


def flags_of(config):
  names = ("width", "batch_size", "steps", "warmup_steps", "eval_every")
  names += ("seeds", "cases", "error_threshold", "checkpoint_every")
  names += tuple(name for name in config if name.startswith("profile_"))
  return [f"--config.{name}={config[name]}" for name in names]


def test_job_prints_tables_and_writes_rows_and_a_plot(tmp_path, tiny_hosted):
  config = tiny_hosted("weights_vgg", cases=("fp32", "awp"))
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  done = subprocess.run(
    [
      *(sys.executable, "-m", "experiments.weights"),
      "--config=configs/weights_vgg.py",
      *flags_of(config),
      *(f"--json={json}", f"--plot={plot}", "--link=pcie5_x16"),
      f"--workdir={tmp_path / 'job'}",
    ],
    cwd=ROOT,
    env=kept | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=WAIT_S,
  )
  assert done.returncode == 0, done.stderr
  for part in ("153.93", "0.853", "pcie5_x16", "Predicted ms"):
    assert part in done.stdout
  assert "\x1b[" not in done.stdout
  rows = records.read_rows(json)
  ours = {row.case for row in rows if not row.case.startswith("paper_")}
  assert ours == {"fp32", "awp"}
  cells = {(row.case, row.metric): row for row in rows}
  assert len(cells) == len(rows)
  assert cells["awp", "sent_ratio"].value > 3
  # Here the host is the device: no transfer was measured.
  assert all(
    "emulated" in row.unit
    for (case, metric), row in cells.items()
    if case in ours and ("host_ms" in metric or "device_ms" in metric)
    if not metric.startswith("predicted")
  )
  assert plot.read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "job" / "runs.jsonl").exists()


def test_a_misspelt_case_is_refused_before_any_work(tiny_hosted):
  with pytest.raises(ValueError, match=r"`config.cases` must .*got 'int7'"):
    run.run(tiny_hosted("weights_vgg", cases=("fp32", "int7")))
