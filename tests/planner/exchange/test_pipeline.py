"""Pipelines end when `perfmodel.overlapped_seconds` says."""

import numpy as np
import pytest

from jaxmotion.perfmodel import Message, overlapped_seconds
from jaxmotion.planner.exchange._pipeline import (
  EMPTY_SUFFIX,
  StageTimes,
  advance_pipeline,
  finish_time,
  init_pipeline,
  prepend_stage,
)


def steps(seed, count=20, messages=5):
  """Seconds of messages, float64[messages, count, 4]; some are zero."""
  rng = np.random.default_rng(seed)
  seconds = rng.exponential(size=(messages, count, 4))
  return np.where(rng.uniform(size=seconds.shape) < 0.3, 0.0, seconds)


def stage_of(message):
  compute, encode, link, decode = np.moveaxis(message, -1, 0)
  return StageTimes(compute + encode, link, decode)


def run(messages):
  state = init_pipeline(messages.shape[1])
  for message in messages:
    state = advance_pipeline(state, stage_of(message))
  return state


@pytest.mark.parametrize("seed", range(5))
def test_steps_end_when_the_performance_model_says(seed):
  messages = steps(seed)
  expected = [
    overlapped_seconds(Message(*m) for m in step.tolist())
    for step in np.moveaxis(messages, 1, 0)
  ]
  assert finish_time(run(messages), EMPTY_SUFFIX).tolist() == pytest.approx(
    expected
  )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_a_suffix_is_the_same_for_every_state_before_it(seed, cut):
  suffix = EMPTY_SUFFIX
  follow = steps(seed)[:, :1]
  for message in follow[:cut:-1]:
    stage = StageTimes(*(seconds[0] for seconds in stage_of(message)))
    suffix = prepend_stage(stage, suffix)
  others = steps(seed + 100)[: cut + 1]
  count = others.shape[1]
  whole = np.concatenate([others, np.repeat(follow[cut + 1 :], count, 1)])
  assert finish_time(run(others), suffix) == pytest.approx(
    finish_time(run(whole), EMPTY_SUFFIX)
  )
