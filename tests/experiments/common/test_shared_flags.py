"""Flags that several runners have."""

import subprocess
import sys

import pytest

from tests.experiments.train.test_train import ROOT, environment

RUNNERS = sorted(
  path.stem
  for path in (ROOT / "experiments").glob("*.py")
  if not path.stem.startswith("_") and "app.run" in path.read_text()
)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_process_may_import_all_runners(backwards):
  names = RUNNERS[::-1] if backwards else RUNNERS
  lines = [f"import experiments.{name}" for name in names]
  lines += ["from absl import flags", "flags.FLAGS(['run', '--json=rows'])"]
  lines += ["print(flags.FLAGS.json)"]
  found = subprocess.run(
    [sys.executable, "-c", "\n".join(lines)],
    check=False,
    capture_output=True,
    cwd=ROOT,
    env=environment(),
    text=True,
  )
  assert found.returncode == 0, found.stderr[-2000:]
  assert found.stdout.split() == ["rows"]


@pytest.mark.parametrize("name", ["train", "a2dtwp", "layrub"])
def test_shared_flags_are_those_of_the_runner(name):
  found = subprocess.run(
    [sys.executable, "-m", f"experiments.{name}", "--help"],
    check=False,
    capture_output=True,
    cwd=ROOT,
    env=environment(),
    text=True,
  )
  assert "--json: Where to write rows" in found.stdout, found.stderr[-2000:]
