"""Tests of the flags that several runners define."""

import subprocess
import sys

import pytest

from tests.experiments.jobs import environment
from tests.paths import ROOT

RUNNERS = sorted(
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for path in (ROOT / "experiments").rglob("*.py")
  if "shared_flags.run_main(main)" in path.read_text()
)
IMPORT_ALL = """
import importlib, sys
from absl import flags

for name in sys.argv[1:]:
  runner = importlib.import_module(name)
  of_runner = [f.name for f in flags.FLAGS.get_key_flags_for_module(name)]
  assert "json" in of_runner, f"{name} does not show --json in its --help"
flags.FLAGS(["run", "--json=rows"])
print(flags.FLAGS.json)
"""


def run_python(*arguments):
  return subprocess.run(
    [sys.executable, *arguments],
    check=False,
    capture_output=True,
    cwd=ROOT,
    env=environment(),
    text=True,
  )


@pytest.mark.parametrize("order", [1, -1], ids=["forward", "backward"])
def test_a_process_may_import_all_runners(order):
  assert "experiments.train.__main__" in RUNNERS and len(RUNNERS) >= 15
  found = run_python("-c", IMPORT_ALL, *RUNNERS[::order])
  assert found.returncode == 0, found.stderr[-2000:]
  assert found.stdout.split() == ["rows"]


def test_a_positional_argument_is_an_error():
  code = "from experiments.common import shared_flags as s; s.run_main(print)"
  found = run_python("-c", code, "rows.jsonl")
  assert found.returncode == 1
  assert "Flags must start with --, got 'rows.jsonl'." in found.stderr
