import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import gpu_compile
from experiments.common import records
from experiments.residuals import one_network
from tests.experiments.jobs import environment


def test_the_command_writes_rows_and_draws_them(tmp_path, capsys):
  flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(
    networks=["tiny:2"],
    modes=["plain", "cut"],
    target="cpu",
    json=f"{tmp_path}/rows.jsonl",
    plot=f"{tmp_path}/plot.png",
  ):
    one_network.main()
  found = records.read_rows(tmp_path / "rows.jsonl")
  assert {row.experiment for row in found} == {"residuals_one_network"}
  cases = {row.case for row in found}
  assert len(cases) == 2
  printed = capsys.readouterr().out
  assert all(case in printed for case in cases)
  assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.skipif(
  gpu_compile.explain_refusal() is None, reason="it can be compiled"
)
def test_without_the_compiler_the_command_says_so_and_ends_well():
  done = subprocess.run(
    [
      *(sys.executable, "-m", "experiments.residuals.one_network"),
      *("--networks=alexnet:1", "--target=h100"),
    ],
    env=environment(),
    capture_output=True,
    text=True,
    check=True,
  )
  assert "Nothing can be compiled for h100: " in done.stdout
