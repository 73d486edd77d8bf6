"""`replan` corrects the platform by measurements and solves again."""

import numpy as np
import pytest

from jaxmotion import perfmodel, planner
from jaxmotion.planner import replan
from jaxmotion.planner.exchange._replan import sum_link_seconds, table_of_plan
from tests.planner.problems import PARAMS, THREE, WORK, cluster

SLOW, MIDDLE = cluster(8, gbit=0.1), cluster(8, gbit=30)


def advise(platform, **options):
  return planner.advise(
    WORK, PARAMS, (), platform, candidates=THREE[1:], **options
  )


def parts(plan, platform=None):
  """Predicted seconds without an exchange, of coding and of links."""
  problem = plan.problem
  if platform is not None:
    problem = problem.on_platform(platform)
  step = problem.predict_step(plan.codec, plan.method)
  table, choice = table_of_plan(plan, problem)
  return {
    "compute_s": step.compute_s + step.update_s + step.call_s,
    "coding_s": float(table.coding_s[np.arange(len(choice)), choice].sum()),
    "link_s": sum_link_seconds(table, choice),
    "step_s": step.total_s,
  }


@pytest.mark.parametrize("name", ["compute_s", "coding_s", "link_s", "step_s"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 7.0])
def test_measured_times_are_predicted_afterwards(name, factor):
  plan = advise(SLOW)
  before = parts(plan)
  corrected = replan(plan, **{name: factor * before[name]})
  after = parts(plan, corrected.platform)
  assert after[name] == pytest.approx(factor * before[name], rel=1e-6)
  others = {"coding_s": ["compute_s", "link_s"], "link_s": ["coding_s"]}
  for other in others.get(name, []):
    assert after[other] == pytest.approx(before[other])


def test_several_measurements_are_all_predicted_afterwards():
  plan = advise(SLOW)
  before = parts(plan)
  given = {k: 2 * before[k] for k in ("compute_s", "coding_s")}
  corrected = replan(plan, **given, step_s=3 * before["step_s"])
  after = parts(plan, corrected.platform)
  for name in given:
    assert after[name] == pytest.approx(given[name], rel=1e-6)
  assert after["step_s"] == pytest.approx(3 * before["step_s"], rel=1e-6)


def test_links_faster_than_predicted_need_no_compression():
  plan = advise(SLOW)
  assert plan.is_compressed
  corrected = replan(plan, link_s=parts(plan)["link_s"] / 1e5)
  assert not corrected.is_compressed
  assert corrected.reason.startswith("Do not compress")


def test_codecs_slower_than_predicted_are_not_used():
  plan = advise(SLOW)
  corrected = replan(plan, coding_s=1e4 * parts(plan)["coding_s"])
  assert not corrected.is_compressed
  assert corrected.step.total_s == pytest.approx(corrected.uncompressed.total_s)


def test_links_slower_than_predicted_are_compressed():
  plan = advise(cluster(8, gbit=10_000, latency_s=1e-6))
  assert not plan.is_compressed
  slow = replan(plan, step_s=100 * plan.step.total_s)
  assert slow.is_compressed
  assert slow.uncompressed.total_s == pytest.approx(
    100 * plan.step.total_s, rel=1e-6
  )


def test_replans_compose_and_platforms_can_be_saved(tmp_path):
  plan = advise(SLOW)
  first = replan(plan, coding_s=3 * parts(plan)["coding_s"])
  second = replan(first, coding_s=2 * parts(first)["coding_s"])
  before, after = parts(plan), parts(plan, second.platform)
  assert after["coding_s"] == pytest.approx(6 * before["coding_s"], rel=1e-6)
  perfmodel.save_platform(second.platform, tmp_path / "here.json")
  loaded = perfmodel.load_platform(tmp_path / "here.json")
  assert advise(loaded).step == second.step


@pytest.mark.parametrize(
  ("given", "error", "message"),
  [
    ({}, ValueError, "must be given one of.*'compute_s'"),
    ({"link_s": 0.0}, ValueError, "`link_s` must be a number in"),
    ({"step_s": float("inf")}, ValueError, "`step_s` must be.*got inf"),
    ({"step_s": "1 s"}, TypeError, "`step_s` must be.*got '1 s'"),
    ({"link_s": 1.0, "step_s": 2.0}, ValueError, "`step_s` must be None"),
    ({"step_s": 1e-9}, ValueError, "more than what computing and coding"),
  ],
)
def test_invalid_measurements_are_named(given, error, message):
  with pytest.raises(error, match=message):
    replan(advise(SLOW), **given)


def test_times_that_a_plan_does_not_have_are_refused():
  with pytest.raises(ValueError, match="`coding_s` must be None.*got 1.0"):
    replan(advise(MIDDLE, accuracy_budget=0), coding_s=1.0)
  with pytest.raises(ValueError, match="`link_s` must be None"):
    replan(advise(cluster(1)), link_s=1.0)
