"""Algorithms beside an exchange in every step, and how rarely one pays."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxmotion.core import text_table
from jaxmotion.perfmodel import StepPrediction
from jaxmotion.planner._text import format_bytes, format_seconds
from jaxmotion.planner.exchange._problem import ExchangeProblem

# Local updates exchange as often as adds no more than this share of a step.
_ADDED_SHARE = 0.05
_PERIODS = (2, 4, 8, 16, 32, 64)


class AlgorithmChoice(NamedTuple):
  """One algorithm with its predicted step, or why it is not offered.

  Args:
    name: expression that makes it.
    step_s: predicted seconds of a step, on average; None if not offered.
    wire_bytes: bytes that a worker sends in a step, on average, or None.
    note: what it changes about training, or why it is not offered.

  Example:
    >>> AlgorithmChoice("presets.lion('data', ...)", None, None, "").is_offered
    False
  """

  name: str
  step_s: float | None
  wire_bytes: float | None
  note: str

  @property
  def is_offered(self) -> bool:
    """Whether the training can use it, as far as the planner knows."""
    return self.step_s is not None


class AlgorithmTable(tuple[AlgorithmChoice, ...]):
  """Algorithms, the fastest step first; `str` is a table."""

  def __str__(self) -> str:
    rows = [("algorithm", "step", "wire a step", "note")]
    for choice in self:
      step = "" if choice.step_s is None else format_seconds(choice.step_s)
      sent = ""
      if choice.wire_bytes is not None:
        sent = format_bytes(choice.wire_bytes)
      rows.append((choice.name, step or "not offered", sent, choice.note))
    return text_table(rows)


def exchange_rarely(
  problem: ExchangeProblem, step: StepPrediction
) -> AlgorithmChoice:
  """Predicts local updates with the exchange of a plan, every few steps.

  Args:
    problem: the problem of the plan.
    step: its predicted step.
  """
  base_s = unexchanged_seconds(step)
  exchange_s = step.encode_s + step.link_s + step.decode_s
  enough = [n for n in _PERIODS if exchange_s <= n * _ADDED_SHARE * base_s]
  every = enough[0] if enough else _PERIODS[-1]
  name = f"local_updates(..., every={every})"
  # The anchor, and the momentum of the outer optimizer.
  needed = step.memory_bytes + 2 * params_bytes(problem)
  if refusal := refuse_memory(problem, needed):
    return AlgorithmChoice(name, None, None, refusal)
  return AlgorithmChoice(
    name,
    base_s + exchange_s / every,
    step.wire_bytes / every,
    f"Workers train apart for {every} steps: compare the loss.",
  )


def unexchanged_seconds(step: StepPrediction) -> float:
  """Returns the seconds of a step without any exchange."""
  return step.compute_s + step.update_s + step.call_s


def params_bytes(problem: ExchangeProblem) -> int:
  """Returns the bytes of the parameters."""
  leaves = jax.tree.leaves(problem.step_cost.params)
  return sum(a.size * a.dtype.itemsize for a in leaves)


def refuse_memory(problem: ExchangeProblem, needed: float) -> str:
  """Says that an algorithm does not fit, or nothing."""
  have = problem.platform.device.memory_bytes
  if needed <= have:
    return ""
  return (
    f"It needs {format_bytes(needed)} of memory, and the device has "
    f"{format_bytes(have)}."
  )
