import subprocess
import sys

import pytest

from tests.experiments.jobs import WAIT, environment
from tests.paths import ROOT


@pytest.mark.parametrize("given", ["--subjects=codex", "--round=codex:1"])
def test_the_command_refuses_a_misspelt_subject_in_one_line(given):
  done = subprocess.run(
    [sys.executable, "-m", "experiments.fuzz", given],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=WAIT,
  )
  assert done.returncode == 1
  assert "codex" in done.stderr and "Traceback" not in done.stderr
