"""Exchanges every few steps, and how rarely one pays."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from jaxmotion import presets
from jaxmotion.codecs import Codec
from jaxmotion.perfmodel import StepPrediction
from jaxmotion.planner.exchange._algorithm_choice import (
  AlgorithmChoice,
  offer_choice,
  params_bytes,
  refuse_choice,
  unexchanged_seconds,
)
from jaxmotion.planner.exchange._assumptions import (
  refuse_lookups,
  refuse_no_matrices,
)
from jaxmotion.planner.exchange._problem import ExchangeProblem

# Local updates exchange as often as adds no more than this share of a step.
_ADDED_SHARE = 0.05
_PERIODS = (2, 4, 8, 16, 32, 64)
_APART = "Workers train apart for {every} steps: compare the loss."


def weigh_period(
  problem: ExchangeProblem,
  step: StepPrediction,
  name: str = "local_updates(..., every={every})",
  note: str = _APART,
  *,
  fragments: int = 1,
) -> AlgorithmChoice:
  """Predicts local updates with an exchange every few steps.

  Args:
    problem: the problem of a plan.
    step: predicted step with that exchange.
    name: of the algorithm, with a place for the period.
    note: what it changes about training, with a place for the period.
    fragments: number of parts of the parameters, which divides the period.
  """
  base_s = unexchanged_seconds(step)
  exchange_s = step.encode_s + step.link_s + step.decode_s
  periods = [n for n in _PERIODS if n % fragments == 0]
  enough = [n for n in periods if exchange_s <= n * _ADDED_SHARE * base_s]
  every = enough[0] if enough else periods[-1]
  name, note = name.format(every=every), note.format(every=every)
  choice = AlgorithmChoice(
    name, base_s + exchange_s / every, step.wire_bytes / every, note
  )
  # The anchor, and the momentum of the outer optimizer.
  added_bytes = 2 * params_bytes(problem)
  return offer_choice(problem, choice, step.memory_bytes + added_bytes)


def weigh_rare_presets(
  problem: ExchangeProblem, uncompressed: StepPrediction
) -> Iterator[AlgorithmChoice]:
  """Yields the presets of local updates.

  Args:
    problem: the problem of a plan.
    uncompressed: its predicted step without compression.
  """
  names = ("diloco", "streaming_diloco", "muloco")
  if problem.local_axis is not None:
    note = (
      "It exchanges over one axis: take `local_updates` with an "
      "`exchange(..., local_axis=...)` in its outer chain."
    )
    yield from (refuse_choice(f"presets.{n}(...)", note) for n in names)
    return
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
  refusal = refuse_no_matrices(problem) or refuse_lookups(
    problem, why="It orthogonalizes every matrix, which is wrong for a table"
  )
  if refusal:
    yield refuse_choice("presets.muloco(...)", refusal)
  else:
    codec: Codec = _default(presets.muloco, "codec")
    step = problem.predict_step(codec, None)
    note = f"Replaces the optimizer by Muon. {_APART}"
    yield weigh_period(problem, step, name, note)


def _default(preset: Callable[..., Any], name: str) -> Any:
  """Returns what a preset takes if an argument is not given."""
  return inspect.signature(preset).parameters[name].default
