"""Comparison of an exchange with all others, on the same platform."""

from __future__ import annotations

from jaxmotion.perfmodel import StepPrediction
from jaxmotion.planner.exchange._algorithm_choice import (
  AlgorithmChoice,
  AlgorithmTable,
  offer_choice,
  params_bytes,
  unexchanged_seconds,
)
from jaxmotion.planner.exchange._problem import ExchangeProblem
from jaxmotion.planner.exchange._weigh_presets import weigh_presets
from jaxmotion.planner.exchange._weigh_rare import (
  weigh_period,
  weigh_rare_presets,
)
from jaxmotion.planner.exchange._weigh_sharded import weigh_sharded


def weigh_algorithms(
  problem: ExchangeProblem, step: StepPrediction, uncompressed: StepPrediction
) -> AlgorithmTable:
  """Predicts the steps of all algorithms of the library for one problem.

  Args:
    problem: the problem of a plan.
    step: the predicted step of the plan.
    uncompressed: the predicted step without compression.
  """
  choices = [
    AlgorithmChoice(
      f"exchange({problem.mesh_axis!r}, plan.codec)",
      step.total_s,
      step.wire_bytes,
      "The plan: an exchange in every step.",
    ),
    _weigh_delay(problem, step),
    weigh_period(problem, step),
    *weigh_presets(problem, uncompressed),
    *weigh_rare_presets(problem, uncompressed),
    *weigh_sharded(problem, uncompressed),
  ]
  choices.sort(key=lambda c: float("inf") if c.step_s is None else c.step_s)
  return AlgorithmTable(choices)


def _weigh_delay(
  problem: ExchangeProblem, step: StepPrediction
) -> AlgorithmChoice:
  name = "data_parallel(..., delay=1)"
  coding_s = step.encode_s + step.decode_s
  seconds = max(unexchanged_seconds(step) + coding_s, step.link_s + coding_s)
  note = "The plan's exchange, of gradients that are one step old."
  choice = AlgorithmChoice(name, seconds, step.wire_bytes, note)
  return offer_choice(
    problem, choice, step.memory_bytes + params_bytes(problem)
  )
