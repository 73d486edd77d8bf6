"""Plans of a model within budgets, beside plans made by hand."""

import jax
import pytest

from experiments.common import records
from experiments.common.console import JobError
from experiments.planner import hand_plans
from experiments.planner.hand_plans import CompileStore, HandPlans
from experiments.planner.memory import describe_fit, make_error_rows, make_rows
from experiments.planner.rows import format_plan, summary_table
from experiments.residuals.cases import StepProgram

MODEL = "mlp_gelu:blocks=2:width=32:rows=256"


@pytest.fixture(scope="module")
def hand():
  return HandPlans(MODEL, "exact", "h100", None)


@pytest.fixture(scope="module")
def fits(hand):
  return list(hand_plans.fit_model(hand, (0.3, 1.0)))


def test_no_plan_by_hand_is_faster(fits):
  for fit in fits:
    assert fit.hand_count >= 10 and fit.by_hand is not None
    assert fit.plan is not None, fit.least_bytes
    assert fit.plan.predicted_bytes <= fit.budget_bytes
    assert fit.plan.step_s <= 1.01 * fit.by_hand.step_s


def test_rows_and_lines_name_both_plans(fits):
  every = [row for fit in fits for row in make_rows(fit, "h100")]
  table = summary_table(every).to_markdown()
  assert len(table.splitlines()) == 2 + len(fits)
  for fit in fits:
    rows = {row.metric: row for row in make_rows(fit, "h100")}
    assert rows["plan"].value == fit.plan.name
    assert rows["by_hand"].value == fit.by_hand.policy.name
    step = rows["step_ms_predicted"]
    assert step.value / step.baseline == step.ratio <= 1.01
    assert rows["compilations"].value == 0 and "device_bytes" not in rows
    line = describe_fit(fit)
    assert format_plan(fit.plan.name) in table
    assert fit.plan.name in line and fit.by_hand.policy.name in line


def test_plans_by_hand_that_decide_nothing_have_rows_too(hand):
  names = [plan.policy.name for plan in hand.plans]
  assert len(set(names)) == len(names) >= 20
  assert {"plain", "jax_block_nothing", "ours_offload"} <= set(names)
  steps = [plan.step_s for plan in hand.plans]
  assert steps == sorted(steps)
  rows = {row.metric: row for row in make_error_rows(hand)}
  within = rows["plans_within_15_percent"]
  # Nothing was compiled, so that the predictions stand for that.
  assert within.value == within.baseline == len(names)
  assert rows["least_error"].value == rows["most_error"].value == 0


def test_a_program_is_compiled_once_whatever_plan_it_comes_from(
  tmp_path, monkeypatch
):
  path = tmp_path / "folder" / "known.jsonl"
  x = jax.ShapeDtypeStruct((256,), "float32")
  double, again, other = (
    StepProgram(fn, (x,))
    for fn in (lambda x: 2 * x, lambda y: 2 * y, lambda x: x[:64])
  )
  store = CompileStore("cpu", path)
  first, same, less = map(store.compile, (double, again, other))
  assert first.device_bytes == 2 * x.size * 4
  assert less.device_bytes == (x.size + 64) * 4
  assert same == first and store.known_s == first.compile_s > 0
  assert store.count == 3 and len(path.read_text().splitlines()) == 2
  # Another run reads what this one has written.
  later = CompileStore("cpu", path)
  assert later.compile(double) == first and later.compile(other) == less
  assert len(path.read_text().splitlines()) == 2
  # A full disk leaves the file as it was.
  before = path.read_text()
  sync = records.os.fsync

  def fill_disk(number):
    sync(number)
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(records.os, "fsync", fill_disk)
  with pytest.raises(OSError, match="No space left"):
    store.compile(StepProgram(lambda x: 3 * x, (x,)))
  assert path.read_text() == before
  # A file of something else is refused.
  path.write_text('{"case": "gpt"}\n')
  with pytest.raises(JobError, match="must hold what .* got a line of case"):
    CompileStore("cpu", path)
