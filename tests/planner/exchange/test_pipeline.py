"""The clocks show what the performance model says."""

import numpy as np
import pytest

from jaxmotion.perfmodel import Message, overlapped_seconds
from jaxmotion.planner.exchange._pipeline import (
  NOTHING,
  StageTimes,
  advance_pipeline,
  finish_time,
  init_pipeline,
  prepend_stage,
)


def steps(seed, many=20, messages=5):
  """float64[messages, many, 4], of which some are zero."""
  rng = np.random.default_rng(seed)
  seconds = rng.exponential(size=(messages, many, 4))
  return np.where(rng.uniform(size=seconds.shape) < 0.3, 0.0, seconds)


def parts(message):
  compute, encode, link, decode = np.moveaxis(message, -1, 0)
  return StageTimes(compute + encode, link, decode)


def run(messages):
  clock = init_pipeline(messages.shape[1])
  for message in messages:
    clock = advance_pipeline(clock, parts(message))
  return clock


@pytest.mark.parametrize("seed", range(5))
def test_steps_end_when_the_model_says(seed):
  messages = steps(seed)
  expected = [
    overlapped_seconds(Message(*m) for m in step.tolist())
    for step in np.moveaxis(messages, 1, 0)
  ]
  assert finish_time(run(messages), NOTHING).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_what_is_left_is_the_same_wherever_the_clocks_stand(seed, cut):
  rest = NOTHING
  follow = steps(seed)[:, :1]
  for message in follow[:cut:-1]:
    rest = prepend_stage(StageTimes(*(p[0] for p in parts(message))), rest)
  others = steps(seed + 100)[: cut + 1]
  many = others.shape[1]
  whole = np.concatenate([others, np.repeat(follow[cut + 1 :], many, 1)])
  assert finish_time(run(others), rest) == pytest.approx(
    finish_time(run(whole), NOTHING)
  )
