"""Sentences that explain a plan and each tensor's codec."""

from __future__ import annotations

import numpy as np

from jaxmotion import perfmodel
from jaxmotion.planner import _text
from jaxmotion.planner.exchange import _problem, _table

# Steps are equally long if they differ by less than this share.
_EQUAL = 1e-9


def explain_tensor(
  problem: _problem.ExchangeProblem,
  table: _table.StepTable,
  changed: np.ndarray,
  tensor: int,
  codec: int,
  total_s: np.ndarray,
) -> str:
  """Says why a tensor has its codec: what another would do to the step."""
  # `changed`: int[codecs, tensors], the choice with each codec for this tensor.
  # `total_s`: float64[codecs], seconds of the step.
  added_s = total_s - total_s[codec]
  if codec:
    return _explain_compressed(table, tensor, codec, added_s[0])
  affordable = np.array([problem.is_affordable(choice) for choice in changed])
  equal_s = _EQUAL * total_s[codec]
  return _explain_uncompressed(problem, tensor, added_s, affordable, equal_s)


def _explain_compressed(
  table: _table.StepTable, tensor: int, codec: int, saved_s: float
) -> str:
  sent, full = (table.wire_bytes(tensor, c) for c in (codec, 0))
  coding_s = float(table.coding_s[tensor, codec].sum())
  coding = f"for {_text.format_seconds(coding_s)} of coding"
  if sent >= full:
    return f"Saves {_text.format_seconds(saved_s)} by fewer messages, {coding}."
  return (
    f"Saves {_text.format_seconds(saved_s)}: {_text.format_bytes(sent)} "
    "instead of "
    f"{_text.format_bytes(full)}, {coding}."
  )


def _explain_uncompressed(
  problem: _problem.ExchangeProblem,
  tensor: int,
  added_s: np.ndarray,
  affordable: np.ndarray,
  equal_s: float,
) -> str:
  others = np.arange(1, len(added_s))
  if not len(others):
    return "There is no other codec."
  best = others[np.argmin(added_s[others])]
  name = _text.format_codec(problem.candidates[best])
  if added_s[best] < -equal_s and not affordable[best]:
    error = problem.errors.relative_error(tensor, int(best))
    return (
      f"{name} would save {_text.format_seconds(-added_s[best])}, but its "
      "error of "
      f"{error:.2g} does not fit in the budget."
    )
  within_budget = others[affordable[others]]
  if len(within_budget):
    best = within_budget[np.argmin(added_s[within_budget])]
    name = _text.format_codec(problem.candidates[best])
  if added_s[best] <= equal_s:
    return f"No codec makes the step shorter; {name} is as long."
  return (
    f"{name} would make the step {_text.format_seconds(added_s[best])} longer."
  )


def explain_plan(
  problem: _problem.ExchangeProblem,
  choice: np.ndarray,
  step: perfmodel.StepPrediction,
  uncompressed: perfmodel.StepPrediction,
  uniform_s: np.ndarray,
) -> str:
  """Says what a plan does to the step."""
  # `choice`: int[tensors], a codec for each tensor.
  # `uniform_s`: float64[codecs], seconds with one codec for all tensors.
  if problem.workers == 1 and problem.devices is None:
    return "Do not compress: one worker has nobody to exchange with."
  if choice.any():
    source = "measured" if problem.errors.is_measured else "at most"
    return (
      f"Compress {np.count_nonzero(choice)} of {len(choice)} tensors: "
      f"{_text.format_seconds(step.total_s)} a step instead of "
      f"{_text.format_seconds(uncompressed.total_s)}, "
      f"{_text.format_bytes(step.wire_bytes)} on the wire "
      f"instead of {_text.format_bytes(uncompressed.wire_bytes)}, with an "
      "error of "
      f"{problem.errors.total_error(choice):.2g} ({source})."
    )
  start = (
    "Do not compress: the step takes "
    f"{_text.format_seconds(uncompressed.total_s)}, "
    f"of which the exchange adds {_text.format_seconds(uncompressed.exposed_s)}"
  )
  affordable = [
    c
    for c in range(1, len(uniform_s))
    if problem.is_affordable(np.full_like(choice, c))
  ]
  if not affordable:
    return f"{start}, and no codec's error fits in the budget."
  best = min(affordable, key=lambda c: uniform_s[c])
  name = _text.format_codec(problem.candidates[best])
  return (
    f"{start}; with {name} it would take "
    f"{_text.format_seconds(uniform_s[best])}."
  )
