import time

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.common import records
from experiments.common.tables import index_rows
from experiments.residuals import __main__ as residuals, limits, measure
from experiments.residuals.limits import FittingSize
from experiments.residuals.networks import NetworkSpec
from jaxmotion import planner
from jaxmotion.core import tree_bytes

TINY = NetworkSpec("tiny", 2)
FIT_MEMORY = planner.fit_memory
HOST = "a target: compiled, not run"


def predict_memory(step, target, memory_gib=None):
  """Stands for the compiler, of which test_points is a test."""
  args_bytes = tree_bytes(step.args)
  peak_bytes = measure.predict_figures(step, 0, target).peak_bytes
  sizes = int(peak_bytes) - args_bytes, 0, args_bytes, 0
  return measure.StepMemory(HOST, *sizes, time.perf_counter())


def fit_memory(loss_fn, params, args, platform, budget_bytes, **options):
  """Plans where the budget is that of plain training, else refuses at once."""
  if budget_bytes < 1000:
    raise planner.BudgetTooSmallError(budget_bytes, 1000, "predicted")
  return FIT_MEMORY(loss_fn, params, args, platform, budget_bytes, **options)


def run_command(path, **changes):
  found = FittingSize(3008, measure.StepMemory(HOST, 5, 4, 3, 2, 1.0), 9.5)
  options = {
    "networks": [TINY],
    "modes": ["plain", "cut"],
    "fit": ["plain", "everything"],
    "batch_of": ["tiny"],
    "budget_of": [NetworkSpec("tiny", 2, {"repeats": 1})],
    "budgets": [1.0, 1e-6],
    "target": "cpu",
    # Another runner's flag of this name may be defined in this process.
    "limit_gb": 12.0,
    "json": str(path),
    "plot": None,
  }
  flags.FLAGS.mark_as_parsed()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(measure, "compile_step", predict_memory)
    patch.setattr(planner, "fit_memory", fit_memory)
    patch.setattr(limits, "find_deepest", lambda *_, **__: found)
    patch.setattr(limits, "find_largest_batch", lambda *_, **__: None)
    with flagsaver.flagsaver(**(options | changes)):
      residuals.main()
  return records.read_rows(path)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
  return run_command(tmp_path_factory.mktemp("residuals") / "rows.jsonl")


@pytest.fixture(scope="module")
def rows(found):
  return index_rows(found)


def test_published_figures_and_means_of_networks_are_rows(rows):
  best = rows["paper/layrub/best", "saved_percent"]
  assert (best.value, best.machine) == (98.9, "Layrub, TACO 2018")
  assert rows["paper/layup/12GB", "deepest"].value == 2504
  temp = rows["tiny_batch2/cut", "temp_bytes"]
  mean = rows["mean_of_1/cut", "saved_percent"].value
  assert mean == pytest.approx(100 * (1 - temp.ratio))
  assert rows["best/cut", "saved_percent"].value == mean
  assert ("mean_of_1/plain", "saved_percent") not in rows


def test_a_fitting_size_has_the_memory_of_its_program(rows):
  case = "resnet_batch16/12GB/everything"
  assert rows[case, "deepest"].value == 3008
  assert rows[f"{case}/deepest", "device_bytes"].value == 5 + 3 + 2
  assert rows[f"{case}/deepest", "device_bytes_drawn"].value == 9.5
  assert rows[f"{case}/deepest", "device_bytes"].machine.startswith(HOST)
  assert rows["tiny/12GB/plain", "largest_batch"].value == "none fits"
  assert rows[case, "deepest"].jax == jax.__version__


def test_a_budget_is_met_or_the_least_is_a_row(rows):
  name = next(case for case, _ in rows if case.endswith("/budget_100%"))
  budget = rows[name, "budget_bytes"]
  met = rows[name, "device_bytes"]
  assert met.value <= budget.value and met.baseline == budget.baseline
  assert rows[name, "step_ms_predicted"].ratio == pytest.approx(1, rel=0.1)
  # Plain training fits: residuals are kept at most, as they are.
  for action in ("compress", "offload"):
    assert rows[name, f"{action}_residuals"].value == 0
  least = rows[name.replace("_100%", "_0.0001%"), "least_bytes"]
  assert least.value == 1000


def test_rows_that_hold_still_are_not_measured_again(found, tmp_path):
  copy = tmp_path / "rows.jsonl"
  old = f"{TINY.case}/cut"
  # The sources of one case are others; its figure is wrong.
  records.write_rows(
    copy,
    [
      r._replace(value=0.5, machine="another version")
      if r.case == old and r.metric == "temp_bytes"
      else r
      for r in found
    ],
  )
  again = run_command(copy)
  differ = {
    (a.case, a.metric) for a, b in zip(again, found, strict=True) if a != b
  }
  # Only the time that a compilation takes differs.
  assert len(again) == len(found) and differ == {(old, "compile_s")}
  fresh = run_command(copy, fresh=True)
  times = {r.case: r.value for r in again if r.metric == "compile_s"}
  compiled = {c for c in times if c.count("/") == 1}
  assert compiled == {r.case for r in fresh if r.metric == "flops"}
  for row in fresh:
    if row.metric == "compile_s" and row.case in compiled:
      assert row.value != times[row.case]


def test_rows_of_other_networks_stay_and_are_in_the_means(found, tmp_path):
  copy = tmp_path / "rows.jsonl"
  records.write_rows(copy, found)
  both = run_command(
    copy, networks=[TINY._replace(batch=4)], fit=[], budget_of=[]
  )
  found = index_rows(both)
  savings = [
    100 * (1 - found[f"tiny_batch{n}/cut", "temp_bytes"].ratio) for n in (2, 4)
  ]
  mean = found["mean_of_2/cut", "saved_percent"].value
  assert mean == pytest.approx(sum(savings) / 2)
  assert ("mean_of_1/cut", "saved_percent") not in found
  assert ("tiny_repeats1_batch2/budget_100%", "budget_bytes") in found
  assert ("resnet_batch16/12GB/everything", "deepest") in found
