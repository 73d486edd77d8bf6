"""The script that a newcomer runs first."""

import re
import subprocess
import sys

from tests.paths import ROOT
from tests.processes import environment


def test_the_quickstart_trains():
  done = subprocess.run(
    [sys.executable, ROOT / "examples" / "quickstart.py"],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    check=True,
  )
  losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
  assert len(losses) == 5 and losses[-1] < losses[0] < 2.4
  coded, plain = re.findall(r"([\d,]+)(?: bytes|$)", done.stdout.strip())[-2:]
  ratio = int(plain.replace(",", "")) / int(coded.replace(",", ""))
  assert 7.5 < ratio < 8
