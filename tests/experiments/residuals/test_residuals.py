import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.common import records
from experiments.residuals import __main__ as residuals, limits, measure
from experiments.residuals.limits import FittingSize

TINY = "tiny:2"
HOST = "a target: compiled, not run"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
  path = tmp_path_factory.mktemp("residuals") / "rows.jsonl"
  found = FittingSize(3008, measure.StepMemory(HOST, 5, 4, 3, 2, 1.0), 9.5)
  options = {
    "networks": [TINY],
    "modes": ["plain", "cut"],
    "fit": ["plain", "everything"],
    "batch_of": ["tiny"],
    "budget_of": ["tiny:2:repeats=2"],
    "budgets": ["1", "1e-6"],
    "target": "cpu",
    "json": str(path),
    "plot": None,
  }
  flags.FLAGS.mark_as_parsed()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(limits, "find_deepest", lambda *_, **__: found)
    patch.setattr(limits, "find_largest_batch", lambda *_, **__: None)
    with flagsaver.flagsaver(**options):
      residuals.main()
  return {(r.case, r.metric): r for r in records.read_rows(path)}


def test_published_figures_are_rows(rows):
  best = rows["paper/layrub/best", "saved_percent"]
  assert (best.value, best.machine) == (98.9, "Layrub, TACO 2018")
  assert rows["paper/layup/12GB", "deepest"].value == 2504


def test_the_mean_is_that_of_the_networks(rows):
  (temp,) = (
    r
    for (case, metric), r in rows.items()
    if metric == "temp_bytes" and case.endswith("batch2/cut")
  )
  mean = rows["mean_of_1/cut", "saved_percent"].value
  assert mean == pytest.approx(100 * (1 - temp.ratio))
  assert rows["best/cut", "saved_percent"].value == mean
  assert ("mean_of_1/plain", "saved_percent") not in rows


def test_a_fitting_size_has_the_memory_of_its_program(rows):
  case = "resnet_batch16/12GB/everything"
  assert rows[case, "deepest"].value == 3008
  assert rows[f"{case}/deepest", "device_bytes"].value == 5 + 3 + 2
  assert rows[f"{case}/deepest", "device_bytes_drawn"].value == 9.5
  assert rows[f"{case}/deepest", "device_bytes"].machine == HOST
  assert rows["tiny/12GB/plain", "largest_batch"].value == "none fits"
  assert rows[case, "deepest"].jax == jax.__version__


def test_a_budget_is_met_or_the_least_is_a_row(rows):
  name = next(case for case, _ in rows if case.endswith("/budget_100%"))
  budget = rows[name, "budget_bytes"]
  met = rows[name, "device_bytes"]
  assert met.value <= budget.value and met.baseline == budget.baseline
  assert rows[name, "step_ms_predicted"].ratio == pytest.approx(1, rel=0.1)
  # Plain training fits: no residual needs an action.
  assert rows[name, "keep_residuals"].value == 0
  least = rows[name.replace("_100%", "_0.0001%"), "least_bytes"]
  assert least.value > least.baseline * 1e-6
