"""Algorithms of an exchange, with their predicted steps, and their table."""

from __future__ import annotations

from typing import NamedTuple

from jax.sharding import AbstractMesh, AxisType

from jaxmotion import core, perfmodel
from jaxmotion.planner import _text
from jaxmotion.planner.exchange import _problem


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
  """Algorithms, the fastest step first; `str` is a table.

  Example:
    >>> from jaxmotion.planner import AlgorithmChoice
    >>> print(AlgorithmTable([AlgorithmChoice("exchange", 2e-3, 8e6, "")]))
    algorithm  step  wire a step  note
    exchange   2 ms  8 MB
  """

  def __str__(self) -> str:
    rows = [("algorithm", "step", "wire a step", "note")]
    for choice in self:
      step = (
        "" if choice.step_s is None else _text.format_seconds(choice.step_s)
      )
      sent = ""
      if choice.wire_bytes is not None:
        sent = _text.format_bytes(choice.wire_bytes)
      rows.append((choice.name, step or "not offered", sent, choice.note))
    return core.text_table(rows)


def offer_choice(
  problem: _problem.ExchangeProblem,
  choice: AlgorithmChoice,
  memory_bytes: float,
) -> AlgorithmChoice:
  """Returns an algorithm, or why it does not fit the device."""
  have = problem.platform.device.memory_bytes
  if memory_bytes <= have:
    return choice
  return refuse_choice(
    choice.name,
    f"It needs {_text.format_bytes(memory_bytes)} of memory, and the device "
    "has "
    f"{_text.format_bytes(have)}.",
  )


def refuse_choice(name: str, note: str) -> AlgorithmChoice:
  """Returns an algorithm that is not offered, and why."""
  return AlgorithmChoice(name, None, None, note)


def unexchanged_seconds(step: perfmodel.StepPrediction) -> float:
  """Returns the seconds of a step without any exchange."""
  return step.compute_s + step.update_s + step.call_s


def params_bytes(problem: _problem.ExchangeProblem) -> int:
  """Returns the bytes of the parameters."""
  return core.tree_bytes(problem.step_cost.params)


def make_workers_mesh(problem: _problem.ExchangeProblem) -> AbstractMesh:
  """Returns a mesh of the workers' axes, on no devices."""
  axes = core.axis_names(problem.mesh_axis)
  sizes = tuple(problem.platform.axis(axis).workers for axis in axes)
  kinds = (AxisType.Auto,) * len(axes)
  return AbstractMesh(sizes, axes, axis_types=kinds)
