import os
import subprocess
import sys

import pytest

from experiments import gpu_compile
from experiments.common import records

GPT = "gpt:2:layers=3:length=16:heads=2:width=0.03125:classes=16"


def _run(module, *flags):
  return subprocess.run(
    [sys.executable, "-m", f"experiments.{module}", *flags],
    env={**os.environ, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  ).stdout


def test_the_runner_writes_what_it_prints_and_draws(tmp_path):
  out = _run(
    "residuals.one_network",
    f"--networks={GPT}",
    "--modes=plain,cut",
    "--target=cpu",
    f"--json={tmp_path}/rows.jsonl",
    f"--plot={tmp_path}/plot.png",
  )
  found = {r.case for r in records.read_rows(tmp_path / "rows.jsonl")}
  assert len(found) == 2
  assert all(case.rsplit("/")[-1] in out for case in found)
  assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.skipif(gpu_compile.refusal() is None, reason="it can be compiled")
def test_without_the_compiler_it_says_so_and_ends_well():
  out = _run("residuals.one_network", f"--networks={GPT}", "--target=h100")
  assert "Nothing can be compiled for h100: " in out
