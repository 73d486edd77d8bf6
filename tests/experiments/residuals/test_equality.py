import pytest

from experiments.common import records
from experiments.residuals import equality, rows as residuals_rows
from experiments.residuals.networks import NetworkSpec

SPEC = NetworkSpec("tiny", 2, {"width": 0.5, "stride": 1, "repeats": 1})
MODES = ("plain", "cut", "cut_int8")


@pytest.fixture
def run_command(run_main):
  options = {"networks": [SPEC], "modes": list(MODES[1:])}
  return lambda **changes: run_main(equality.main, **options, **changes)[0]


@pytest.fixture
def known(tmp_path):
  """Rows of another network, and rows of ours that hold still."""
  wrong = records.Measured(0.5, "relative")
  made = records.make_rows(
    "residuals_equality",
    {f"{SPEC.case}/{mode}": {"gradient_error": wrong} for mode in MODES},
  )
  marked = residuals_rows.stamp_rows(made, None)
  rows = [marked[0]._replace(case="other_batch2/plain"), *marked]
  records.write_rows(tmp_path / "rows.jsonl", rows)
  return rows


def test_networks_that_hold_still_are_not_run_again(run_command, known):
  assert run_command() == known


def test_the_lossless_cut_is_as_near_to_float64_as_plain_training(
  run_command, known
):
  other, *fresh = run_command(fresh=True)
  assert other == known[0]
  assert {r.experiment for r in fresh} == {"residuals_equality"}
  rows = {(r.case.rpartition("/")[2], r.metric): r for r in fresh}
  metrics = {
    mode: {metric for case, metric in rows if case == mode} for mode in MODES
  }
  lossy = {"gradient_error", "gradient_from_plain", "values_equal"}
  assert metrics == {
    "plain": {"gradient_error"},
    "cut": lossy | {"gradient_error_float64"},
    "cut_int8": lossy,
  }
  assert 0 < rows["plain", "gradient_error"].value < 1e-3
  assert rows["cut", "gradient_error"].ratio == pytest.approx(1, abs=0.1)
  assert rows["cut", "gradient_from_plain"].value < 1e-5
  assert rows["cut", "gradient_error_float64"].value < 1e-12
  assert 1e-4 < rows["cut_int8", "gradient_error"].value < 0.1
  assert rows["cut_int8", "values_equal"].value < 1
