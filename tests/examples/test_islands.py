"""The example of islands, started twice beside each other."""

import re
import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.processes import WAIT, environment

pytest.importorskip("obstore")


def test_two_islands_train_in_one_folder(tmp_path):
  command = [sys.executable, ROOT / "examples" / "islands.py", tmp_path / "run"]
  jobs = [
    subprocess.Popen(
      command,
      cwd=ROOT,
      env=environment(),
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(2)
  ]
  for job in jobs:
    text, _ = job.communicate(timeout=WAIT)
    assert job.returncode == 0
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 10 and losses[-1] < 1.2 < losses[0]
    assert float(text.rsplit(maxsplit=1)[-1]) < 1.2
  kinds = {path.name.split(".")[0] for path in (tmp_path / "run").iterdir()}
  assert kinds == {"commit", "contribution", "snapshot"}
