"""Links between hosts, measured by a job of two processes."""

import os
import re
import sys

import jax
import pytest

from jaxmotion import perfmodel
from jaxmotion.command import main
from tests.paths import ROOT
from tests.processes import environment, free_address, run_together

SIZES = ("--largest=8192", "--sizes=2", "--repeats=2")


def run_hosts(folder, devices):
  """Runs two hosts of some devices; returns what each of them prints."""
  address = free_address()
  flags = (
    "links",
    "lab.json",
    "--platform=h100_node",
    f"--coordinator_address={address}",
    "--num_processes=2",
    *SIZES,
  )
  kept = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(devices)}
  command = [sys.executable, "-m", "jaxmotion", *flags]
  said, codes = run_together(
    [[*command, f"--process_id={index}"] for index in range(2)],
    cwd=folder,
    env=environment(cache=False) | kept,
  )
  assert codes == [0, 0]
  return said


def test_two_hosts_write_a_platform_that_advise_reads(tmp_path, capsys):
  first, second = run_hosts(tmp_path, devices=2)
  for line in ("host 0 to 1: ", "host 1 to 0: ", "host 0 to 1 and 1 to 0: "):
    assert line in first
  assert "the first host writes" in second
  assert os.listdir(tmp_path) == ["lab.json"]
  path = tmp_path / "lab.json"
  found = perfmodel.load_platform(path)
  like = perfmodel.builtin_platform("h100_node")
  assert [(a.name, a.workers) for a in found.axes] == [
    ("host", 2),
    ("device", 2),
  ]
  assert found.device == like.device
  assert found.axes[1].link == like.axes[0].link
  assert found.axes[0].link.rate.bytes_per_s > 0
  assert "4 emulated devices at once" in found.sources["axes.host.rate"]
  (tmp_path / "model.py").write_text(
    "import jax.numpy as jnp\n"
    "def make_loss():\n"
    "  return lambda w, x: jnp.mean(x @ w), jnp.ones((64, 64)), jnp.ones(64)\n"
  )
  task = f"{tmp_path}/model.py:make_loss"
  assert main(["bytes", task, f"--platform={path}"]) == 0
  assert "4 workers of lab" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("flags", "error", "message"),
  [
    (("--platform=lan",), None, "`--platform` must be one of"),
    (
      ("--platform=cpu2",),
      ValueError("coordinator_address should be defined."),
      "`--coordinator_address`, .* must be given, or .* should be defined",
    ),
    (("--platform=cpu2",), None, "`--num_processes` must be at least 2, got 1"),
    (
      ("--platform=cpu2", "--repeats=0"),
      None,
      "`--repeats` must be an integer",
    ),
  ],
)
def test_a_job_that_cannot_be_measured_ends_with_one_line(
  tmp_path, capsys, monkeypatch, flags, error, message
):
  def initialize(**_):
    if error is not None:
      raise error

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  assert main(["links", str(tmp_path / "lab.json"), *flags]) == 1
  line = capsys.readouterr().err.splitlines()[-1]
  assert re.match(f"jaxmotion: .*{message}", line)
