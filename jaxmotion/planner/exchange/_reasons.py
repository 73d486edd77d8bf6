"""One sentence for each tensor, and one for the plan."""

from __future__ import annotations

import numpy as np

from jaxmotion.perfmodel import StepPrediction
from jaxmotion.planner._text import format_bytes, format_codec, format_seconds
from jaxmotion.planner.exchange._problem import ExchangeProblem
from jaxmotion.planner.exchange._table import Table

_EQUAL = 1e-9  # Of the step.


def tensor_reason(
  request: ExchangeProblem,
  table: Table,
  changed: np.ndarray,
  tensor: int,
  codec: int,
  total: np.ndarray,
) -> str:
  """Says why a tensor has its codec, by what another would do to the step.

  Args:
    request: what was asked.
    table: of every codec on every tensor.
    changed: int[codecs, tensors], the choice with each codec in this place.
    tensor: which one.
    codec: that was chosen for it.
    total: float64[codecs], seconds of the step.
  """
  longer = total - total[codec]
  if codec:
    return _compressed(table, tensor, codec, longer[0])
  affordable = np.array([request.affords(choice) for choice in changed])
  return _plain(request, tensor, longer, affordable, _EQUAL * total[codec])


def _compressed(table: Table, tensor: int, codec: int, saved: float) -> str:
  sent, whole = (table.wire_bytes(tensor, c) for c in (codec, 0))
  coding = (
    f"for {format_seconds(float(table.coding[tensor, codec].sum()))} of coding"
  )
  if sent >= whole:
    return f"Saves {format_seconds(saved)} by fewer messages, {coding}."
  return (
    f"Saves {format_seconds(saved)}: {format_bytes(sent)} instead of "
    f"{format_bytes(whole)}, {coding}."
  )


def _plain(
  request: ExchangeProblem,
  tensor: int,
  longer: np.ndarray,
  affordable: np.ndarray,
  equal: float,
) -> str:
  others = np.arange(1, len(longer))
  if not len(others):
    return "There is no other codec."
  best = others[np.argmin(longer[others])]
  name = format_codec(request.candidates[best])
  if longer[best] < -equal and not affordable[best]:
    error = request.errors.relative(tensor, int(best))
    return (
      f"{name} would save {format_seconds(-longer[best])}, but its error of "
      f"{error:.2g} does not fit in the budget."
    )
  fits = others[affordable[others]]
  if len(fits):
    best = fits[np.argmin(longer[fits])]
    name = format_codec(request.candidates[best])
  if longer[best] <= equal:
    return f"No codec makes the step shorter; {name} is as long."
  return f"{name} would make the step {format_seconds(longer[best])} longer."


def plan_reason(
  request: ExchangeProblem,
  choice: np.ndarray,
  step: StepPrediction,
  plain: StepPrediction,
  uniform: np.ndarray,
) -> str:
  """Says what a plan does to the step.

  Args:
    request: what was asked.
    choice: a codec for each tensor.
    step: predicted.
    plain: predicted without compression.
    uniform: float64[codecs], seconds with one codec for all tensors.
  """
  if request.workers == 1 and request.route.local_axis is None:
    return "Do not compress: one worker has nobody to exchange with."
  if choice.any():
    return (
      f"Compress {np.count_nonzero(choice)} of {len(choice)} tensors: "
      f"{format_seconds(step.total_s)} a step instead of "
      f"{format_seconds(plain.total_s)}, "
      f"{format_bytes(step.wire_bytes)} on the wire "
      f"instead of {format_bytes(plain.wire_bytes)}, with an error of "
      f"{request.errors.total(choice):.2g} "
      f"({'measured' if request.errors.measured else 'at most'})."
    )
  said = (
    f"Do not compress: the step takes {format_seconds(plain.total_s)}, of "
    f"which the exchange adds {format_seconds(plain.exposed_s)}"
  )
  rest = [
    c
    for c in range(1, len(uniform))
    if request.affords(np.full_like(choice, c))
  ]
  if not rest:
    return f"{said}, and no codec's error fits in the budget."
  best = min(rest, key=lambda c: uniform[c])
  name = format_codec(request.candidates[best])
  return f"{said}; with {name} it would take {format_seconds(uniform[best])}."
