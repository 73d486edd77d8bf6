"""`replan` corrects the platform by measurements and solves again."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxmotion import perfmodel, planner
from jaxmotion.planner import replan
from jaxmotion.planner.exchange._replan import sum_link_seconds, table_of_plan
from tests.planner.problems import PARAMS, THREE, WORK, cluster

SLOW = cluster(8, gbit=0.1)


def advise(platform, **options):
  options["candidates"] = THREE[1:]
  return planner.advise(WORK, PARAMS, (), platform, **options)


@functools.cache
def slow_plan():
  return advise(SLOW)


def parts(plan, platform=None):
  """Predicted seconds without an exchange, of coding and of links."""
  problem = plan.problem
  if platform is not None:
    problem = dataclasses.replace(problem, platform=platform)
  step = problem.predict_step(plan.codec, plan.method)
  table, choice = table_of_plan(plan, problem)
  return {
    "compute_s": step.compute_s + step.update_s + step.call_s,
    "coding_s": float(table.coding_s[np.arange(len(choice)), choice].sum()),
    "link_s": sum_link_seconds(table, choice),
    "step_s": step.total_s,
  }


@pytest.mark.parametrize(
  ("factors", "kept"),
  [
    ({"compute_s": 7}, ()),
    ({"coding_s": 0.5}, ("compute_s", "link_s")),
    ({"link_s": 7}, ("coding_s",)),
    ({"step_s": 0.5}, ()),
    ({"compute_s": 2, "coding_s": 2, "step_s": 3}, ()),
  ],
)
def test_measured_times_are_predicted_afterwards(factors, kept):
  plan = slow_plan()
  before = parts(plan)
  given = {name: times * before[name] for name, times in factors.items()}
  after = parts(plan, replan(plan, **given).platform)
  for name, seconds in given.items():
    assert after[name] == pytest.approx(seconds, rel=1e-6)
  for name in kept:
    assert after[name] == pytest.approx(before[name])


@pytest.mark.parametrize(
  ("name", "factor"), [("link_s", 1e-5), ("coding_s", 1e4)]
)
def test_fast_links_and_slow_codecs_need_no_compression(name, factor):
  plan = slow_plan()
  assert plan.is_compressed
  corrected = replan(plan, **{name: factor * parts(plan)[name]})
  assert not corrected.is_compressed
  assert corrected.reason.startswith("Do not compress")
  assert corrected.step.total_s == pytest.approx(corrected.uncompressed.total_s)


def test_links_slower_than_predicted_are_compressed():
  plan = advise(cluster(8, gbit=10_000, latency_s=1e-6))
  assert not plan.is_compressed
  slow = replan(plan, step_s=100 * plan.step.total_s)
  assert slow.is_compressed
  expected = 100 * plan.step.total_s
  assert slow.uncompressed.total_s == pytest.approx(expected, rel=1e-6)


def test_replans_compose_and_platforms_can_be_saved(tmp_path):
  plan = slow_plan()
  first = replan(plan, coding_s=3 * parts(plan)["coding_s"])
  second = replan(first, coding_s=2 * parts(first)["coding_s"])
  before, after = parts(plan), parts(plan, second.platform)
  assert after["coding_s"] == pytest.approx(6 * before["coding_s"], rel=1e-6)
  perfmodel.save_platform(second.platform, tmp_path / "here.json")
  loaded = perfmodel.load_platform(tmp_path / "here.json")
  assert advise(loaded).step == second.step


@pytest.mark.parametrize(
  ("make", "given", "message"),
  [
    (slow_plan, {}, "must be given one of.*'compute_s'"),
    (slow_plan, {"link_s": 1.0, "step_s": 2.0}, "`step_s` must be None"),
    (slow_plan, {"step_s": 1e-9}, "more than what computing and coding"),
    # A plan has no times of what it does not do.
    (
      lambda: advise(SLOW, accuracy_budget=0),
      {"coding_s": 1.0},
      "`coding_s` must be None.*got 1.0",
    ),
    (lambda: advise(cluster(1)), {"link_s": 1.0}, "`link_s` must be None"),
  ],
)
def test_invalid_measurements_are_named(make, given, message):
  with pytest.raises(ValueError, match=message):
    replan(make(), **given)
