"""Tables and pipelines take the seconds that the performance model predicts."""

import dataclasses

import numpy as np
import pytest

import jaxmotion
from jaxmotion import codecs, perfmodel
from jaxmotion.perfmodel import Curve, predict_step
from jaxmotion.perfmodel._step import Message, overlapped_seconds
from jaxmotion.planner.exchange import _table
from tests.planner.problems import (
  PARAMS,
  THREE,
  WORK,
  cluster,
  every_choice,
  problem_on,
  rules_of,
)

CHOICES = every_choice(3, 3)
MIXED = (CHOICES == 2).any(1)  # Some payload is not summed.


def table_for(problem, method, *, mixed=True, candidates=THREE):
  costs = _table.TensorCosts(problem)
  return _table.make_table(costs, candidates, method, mixed=mixed)


def predicted(problem, choice, method, candidates=THREE):
  return predict_step(
    WORK,
    problem.platform,
    problem.mesh_axis,
    rules_of(choice, candidates),
    bucket_bytes=problem.bucket_bytes,
    overlap=problem.overlap,
    method=method,
  )


PROBLEMS = {
  "one": problem_on(cluster(1)),
  "two": problem_on(cluster(2)),
  "two_buckets": problem_on(cluster(2), bucket_bytes=1),
  "eight": problem_on(cluster(8)),
  "blocking": problem_on(cluster(8), overlap=False, bucket_bytes=1 << 16),
  "buckets": problem_on(cluster(8, gbit=100), bucket_bytes=1),
  "hosts": problem_on(
    perfmodel.builtin_platform("h100_cluster").resize(host=4),
    jaxmotion.HostAxes("host", "device"),
  ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_step_is_as_long_as_the_performance_model_says(name):
  problem = PROBLEMS[name]
  method = ("gather", "two_phase")[list(PROBLEMS).index(name) % 2]
  table = table_for(problem, method)
  chosen = CHOICES[MIXED][::3]
  expected = [predicted(problem, c, method) for c in chosen]
  assert table.step_seconds(chosen).tolist() == pytest.approx(
    [step.total_s for step in expected], rel=1e-9
  )
  for choice, step in zip(chosen, expected, strict=True):
    rows = [table.axis_bytes(i, c) for i, c in enumerate(choice)]
    sent = list(step.axis_bytes.values())
    assert np.sum(rows, 0).tolist() == pytest.approx(sent)


def test_sums_between_two_workers_join_payloads_that_are_not_summed():
  problem = PROBLEMS["two"]
  own = (codecs.identity(), codecs.uniform(bits=8))
  alone, mixed = (
    table_for(problem, "gather", mixed=is_mixed, candidates=own)
    for is_mixed in (False, True)
  )
  nothing, all_but_bias = np.zeros(3, int), np.array([0, 1, 1])
  for table, choice in ((alone, nothing), (mixed, all_but_bias)):
    step = predicted(problem, choice, "gather", own)
    assert table.total_seconds(choice) == pytest.approx(step.total_s, rel=1e-9)
  assert alone.total_seconds(all_but_bias) != pytest.approx(
    mixed.total_seconds(all_but_bias), rel=1e-6
  )


def test_measured_collectives_are_followed_within_a_thousandth():
  platform = cluster(8)
  (axis,) = platform.axes
  sizes, seconds = (1e2, 1e4, 1e5, 1e7), (1e-4, 5e-4, 1e-2, 0.4)
  curve = Curve(sizes=sizes, seconds=seconds, noise=0.1)
  link = dataclasses.replace(
    axis.link,
    measured={f"{op} 8": curve for op in ("all_reduce", "all_to_all")},
  )
  axis = dataclasses.replace(axis, link=link)
  problem = problem_on(dataclasses.replace(platform, axes=(axis,)))
  table = table_for(problem, "two_phase")
  for choice in CHOICES[::5]:
    step = predicted(problem, choice, "two_phase")
    assert table.total_seconds(choice) == pytest.approx(step.total_s, rel=1e-3)


def test_a_tensor_is_predicted_once():
  costs, like = _table.TensorCosts(PROBLEMS["eight"]), PARAMS["first"]
  one = costs.predict_tensor(THREE[0], like, "gather", True)
  assert costs.predict_tensor(THREE[0], like, "two_phase", False) is one
  assert costs.predict_tensor(THREE[1], like, "two_phase", False) is not one


def steps(seed, count=20, messages=5):
  """Seconds of messages, float64[messages, count, 4]; some are zero."""
  rng = np.random.default_rng(seed)
  seconds = rng.exponential(size=(messages, count, 4))
  return np.where(rng.uniform(size=seconds.shape) < 0.3, 0.0, seconds)


def stage_of(message):
  compute, encode, link, decode = np.moveaxis(message, -1, 0)
  return _table.StageTimes(compute + encode, link, decode)


def run(messages):
  state = _table.init_pipeline(messages.shape[1])
  for message in messages:
    state = _table.advance_pipeline(state, stage_of(message))
  return state


@pytest.mark.parametrize("seed", range(3))
def test_steps_end_when_the_performance_model_says(seed):
  messages = steps(seed)
  expected = [
    overlapped_seconds(Message(*m) for m in step.tolist())
    for step in np.moveaxis(messages, 1, 0)
  ]
  ends = _table.finish_time(run(messages), _table.EMPTY_SUFFIX)
  assert ends.tolist() == pytest.approx(expected)
  # A suffix is the same for every state before it.
  suffix, follow = _table.EMPTY_SUFFIX, steps(seed + 100)[:, :1]
  for message in follow[::-1]:
    stage = _table.StageTimes(*(seconds[0] for seconds in stage_of(message)))
    suffix = _table.prepend_stage(stage, suffix)
  later = np.repeat(follow, messages.shape[1], 1)
  whole = run(np.concatenate([messages, later]))
  assert _table.finish_time(run(messages), suffix) == pytest.approx(
    _table.finish_time(whole, _table.EMPTY_SUFFIX)
  )
