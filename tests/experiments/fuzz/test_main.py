import subprocess
import sys

import pytest

from experiments.common import records
from experiments.fuzz.subjects import SUBJECTS
from tests.experiments.jobs import WAIT, environment
from tests.paths import ROOT


def run_command(*flags):
  return subprocess.run(
    [sys.executable, "-m", "experiments.fuzz", *flags],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=WAIT,
  )


def test_the_command_prints_counts_and_writes_rows(tmp_path):
  path = tmp_path / "fuzz.jsonl"
  done = run_command(
    "--subjects=files", "--minutes=0", "--processes=1", f"--json={path}"
  )
  assert done.returncode == 0, done.stderr
  counts = {row.metric: row.value for row in records.read_rows(path)}
  assert counts["rounds"] == 1 and counts["cases"] > 100
  assert counts["defects"] == 0
  assert f"{counts['cases']}" in done.stdout


def test_the_page_names_every_subject():
  page = (ROOT / "docs" / "fuzz.md").read_text()
  assert [name for name in SUBJECTS if f"| {name} |" not in page] == []


@pytest.mark.parametrize("given", ["--subjects=codex", "--round=codex:1"])
def test_the_command_refuses_a_misspelt_subject_in_one_line(given):
  done = run_command(given)
  assert done.returncode == 1
  assert "codex" in done.stderr and "Traceback" not in done.stderr
