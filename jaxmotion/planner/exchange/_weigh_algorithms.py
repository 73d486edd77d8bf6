"""Comparison of an exchange with all others, on the same platform."""

from __future__ import annotations

from jaxmotion import perfmodel
from jaxmotion.planner.exchange import (
  _algorithm_choice,
  _problem,
  _weigh_presets,
  _weigh_rare,
  _weigh_sharded,
)


def weigh_algorithms(
  problem: _problem.ExchangeProblem,
  step: perfmodel.StepPrediction,
  uncompressed: perfmodel.StepPrediction,
) -> _algorithm_choice.AlgorithmTable:
  """Predicts the steps of all algorithms of the library for one problem."""
  choices = [
    _algorithm_choice.AlgorithmChoice(
      f"exchange({problem.mesh_axis!r}, plan.codec)",
      step.total_s,
      step.wire_bytes,
      "The plan: an exchange in every step.",
    ),
    _weigh_delay(problem, step),
    _weigh_rare.weigh_period(problem, step),
    *_weigh_presets.weigh_presets(problem, uncompressed),
    *_weigh_rare.weigh_rare_presets(problem, uncompressed),
    *_weigh_sharded.weigh_sharded(problem, uncompressed),
  ]
  choices.sort(key=lambda c: float("inf") if c.step_s is None else c.step_s)
  return _algorithm_choice.AlgorithmTable(choices)


def _weigh_delay(
  problem: _problem.ExchangeProblem, step: perfmodel.StepPrediction
) -> _algorithm_choice.AlgorithmChoice:
  name = "delayed(...)"
  coding_s = step.encode_s + step.decode_s
  seconds = max(
    _algorithm_choice.unexchanged_seconds(step) + coding_s,
    step.link_s + coding_s,
  )
  note = "The plan's exchange, of gradients that are one step old."
  choice = _algorithm_choice.AlgorithmChoice(
    name, seconds, step.wire_bytes, note
  )
  return _algorithm_choice.offer_choice(
    problem, choice, step.memory_bytes + _algorithm_choice.params_bytes(problem)
  )
