"""Exchanges every few steps, and how rarely one pays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from jaxmotion import codecs, perfmodel, presets
from jaxmotion.planner.exchange import (
  _algorithm_choice,
  _problem,
  _weigh_presets,
)

# Local updates exchange as often as adds no more than this share of a step.
_ADDED_SHARE = 0.05
_PERIODS = (2, 4, 8, 16, 32, 64)
_APART = "Workers train apart for {every} steps: compare the loss."


def weigh_period(
  problem: _problem.ExchangeProblem,
  step: perfmodel.StepPrediction,
  name: str = "local_updates(..., every={every})",
  note: str = _APART,
  *,
  fragments: int = 1,
) -> _algorithm_choice.AlgorithmChoice:
  """Predicts local updates with an exchange every few steps."""
  base_s = _algorithm_choice.unexchanged_seconds(step)
  exchange_s = step.encode_s + step.link_s + step.decode_s
  periods = [n for n in _PERIODS if n % fragments == 0]
  enough = [n for n in periods if exchange_s <= n * _ADDED_SHARE * base_s]
  every = enough[0] if enough else periods[-1]
  name, note = name.format(every=every), note.format(every=every)
  choice = _algorithm_choice.AlgorithmChoice(
    name, base_s + exchange_s / every, step.wire_bytes / every, note
  )
  # The anchor, and the momentum of the outer optimizer.
  added_bytes = 2 * _algorithm_choice.params_bytes(problem)
  return _algorithm_choice.offer_choice(
    problem, choice, step.memory_bytes + added_bytes
  )


def weigh_rare_presets(
  problem: _problem.ExchangeProblem, uncompressed: perfmodel.StepPrediction
) -> Iterator[_algorithm_choice.AlgorithmChoice]:
  """Yields the presets of local updates."""
  yield weigh_period(
    problem, uncompressed, "presets.diloco(..., every={every})"
  )
  streaming = presets.streaming_diloco
  yield weigh_period(
    problem,
    problem.predict_step(_default(streaming, "codec"), None),
    "presets.streaming_diloco(..., every={every})",
    _APART,
    fragments=_default(streaming, "fragments"),
  )
  name = "presets.muloco(..., every={every})"
  refusal = _weigh_presets.refuse_no_matrices(
    problem
  ) or _weigh_presets.refuse_lookups(
    problem, why="It orthogonalizes every matrix, which is wrong for a table"
  )
  if refusal:
    yield _algorithm_choice.refuse_choice("presets.muloco(...)", refusal)
  else:
    codec: codecs.Codec = _default(presets.muloco, "codec")
    step = problem.predict_step(codec, None)
    note = f"Replaces the optimizer by Muon. {_APART}"
    yield weigh_period(problem, step, name, note)


def _default(preset: Callable[..., Any], name: str) -> Any:
  """Returns what a preset takes if an argument is not given."""
  return inspect.signature(preset).parameters[name].default
