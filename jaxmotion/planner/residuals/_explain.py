"""Rows of a memory plan: each residual's action, costs and reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmotion.memory.residuals import Residual
from jaxmotion.planner._text import format_bytes, format_seconds
from jaxmotion.planner.residuals._costs import (
  KeepOption,
  ResidualCosts,
  is_recomputed,
)
from jaxmotion.planner.residuals._enumerate import PlanCandidate
from jaxmotion.planner.residuals._layers import layer_of
from jaxmotion.planner.residuals._plan import MemoryPlanRow


def explain_residuals(
  costs: ResidualCosts, candidate: PlanCandidate, saved: Sequence[Residual]
) -> Iterator[MemoryPlanRow]:
  """Yields a row for each residual that is saved or recomputed.

  Args:
    costs: costs of the function's residuals.
    candidate: candidate that the plan was made from.
    saved: residuals that the plan saves.
  """
  adjustable = costs.trace_variant(candidate.recomputed).adjustable
  base_names = {r.name for r in costs.trace_variant().residuals}
  for name in dict.fromkeys(r.name for r in saved):
    own = [r for r in saved if r.name == name]
    reason = "It fits." if name in adjustable else "Small."
    if name not in base_names:
      reason = "Others are recomputed from it."
    yield _explain_saved(costs, own, saved, reason)
  yield from _explain_recomputed(costs, candidate, {r.name for r in saved})


def _explain_recomputed(
  costs: ResidualCosts, candidate: PlanCandidate, saved_names: set[str]
) -> Iterator[MemoryPlanRow]:
  """Yields rows of recomputed residuals.

  Only the seconds of all recomputation are known. They are shared out in
  proportion to the residuals' bytes.
  """
  base = costs.trace_variant()
  recomputed = [
    r
    for r in base.residuals
    if r.name not in saved_names and is_recomputed(r.name, candidate.recomputed)
  ]
  total_bytes = sum(r.nbytes * r.repeats for r in recomputed)
  total_s = costs.trace_variant(candidate.recomputed).step_s - base.step_s
  for r in recomputed:
    full_bytes = r.nbytes * r.repeats
    reason = f"Saves {format_bytes(r.encoded_bytes * r.repeats)}."
    seconds = total_s * full_bytes / total_bytes
    yield MemoryPlanRow(
      r.name, "recompute", None, full_bytes, 0, 0, seconds, reason
    )


def _explain_saved(
  costs: ResidualCosts,
  residuals: Sequence[Residual],
  saved: Sequence[Residual],
  reason: str,
) -> MemoryPlanRow:
  """Returns the row of the residuals of one name.

  Args:
    costs: costs of the function's residuals.
    residuals: residuals of that name.
    saved: all residuals that the plan saves.
    reason: why they are kept, if they are neither encoded nor offloaded.
  """
  first = residuals[0]
  option = costs.sum_costs(residuals)
  encoded_bytes = sum(r.encoded_bytes * r.repeats for r in residuals)
  full_bytes = sum(r.nbytes * r.repeats for r in residuals)
  exposed_s = _share_exposed(costs, option, layer_of(first.name), saved)
  action = "keep" if first.codec is None else "compress"
  if first.on_host:
    action = "offload"
    link = format_seconds(option.to_host_s + option.from_host_s)
    reason = (
      f"Saves {format_bytes(full_bytes)}; of {link} of the link, "
      f"{format_seconds(exposed_s)} show."
    )
  elif first.codec is not None:
    saved_bytes = format_bytes(full_bytes - encoded_bytes)
    coding = format_seconds(option.device_s)
    reason = f"Saves {saved_bytes} for {coding} of coding."
  return MemoryPlanRow(
    first.name,
    action,
    first.codec,
    full_bytes,
    option.device_bytes,
    encoded_bytes - option.device_bytes,
    option.device_s + exposed_s,
    reason,
  )


def _share_exposed(
  costs: ResidualCosts,
  option: KeepOption,
  layer: str,
  saved: Sequence[Residual],
) -> float:
  """Returns a residual's share of its layer's exposed transfer seconds."""
  link_s = option.to_host_s + option.from_host_s
  if not link_s:
    return 0.0
  whole = costs.sum_costs([r for r in saved if layer_of(r.name) == layer])
  exposed_s = float(
    costs.exposed_seconds(layer, whole.to_host_s, whole.from_host_s)
  )
  return exposed_s * link_s / (whole.to_host_s + whole.from_host_s)
