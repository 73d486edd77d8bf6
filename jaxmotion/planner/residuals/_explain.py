"""Rows of a memory plan: each residual's action, costs and reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmotion.memory.residuals import Residual
from jaxmotion.planner import _text
from jaxmotion.planner.residuals import _costs, _layers, _plan, _prices, _recipe


def explain_residuals(
  prices: _prices.StepPrices, recipe: _recipe.Recipe
) -> Iterator[_plan.MemoryPlanRow]:
  """Yields a row for each residual that a cut saves or recomputes."""
  if recipe.kind != "cut":
    return
  saved = prices.list_residuals(recipe)
  fastest = _recipe.make_cut(1.0)
  base = prices.list_residuals(fastest)
  base_names = {r.name for r in base}
  for name in dict.fromkeys(r.name for r in saved):
    own = [r for r in saved if r.name == name]
    reason = "It fits."
    if name not in base_names:
      reason = "Others are recomputed from it."
    yield _explain_saved(prices.costs, own, saved, reason)
  before, after = prices.price(fastest), prices.price(recipe)
  assert before is not None and after is not None
  coding_s = prices.costs.sum_costs(saved).device_s
  coding_s += prices.costs.transfer_seconds(saved)
  added_s = after.step_s - before.step_s - coding_s
  names = {r.name for r in saved}
  gone = [r for r in base if r.name not in names]
  yield from _explain_recomputed(gone, added_s)


def _explain_recomputed(
  recomputed: Sequence[Residual], added_s: float
) -> Iterator[_plan.MemoryPlanRow]:
  """Yields rows of recomputed residuals."""
  # Only the seconds of all recomputation are known. They are shared out in
  # proportion to the residuals' bytes.
  total_bytes = sum(r.nbytes * r.repeats for r in recomputed)
  for r in recomputed:
    full_bytes = r.nbytes * r.repeats
    reason = f"Saves {_text.format_bytes(r.encoded_bytes * r.repeats)}."
    seconds = added_s * full_bytes / total_bytes
    yield _plan.MemoryPlanRow(
      r.name, "recompute", None, full_bytes, 0, 0, seconds, reason
    )


def _explain_saved(
  costs: _costs.ResidualCosts,
  residuals: Sequence[Residual],
  saved: Sequence[Residual],
  reason: str,
) -> _plan.MemoryPlanRow:
  """Returns the row of the residuals of one name."""
  first = residuals[0]
  option = costs.sum_costs(residuals)
  encoded_bytes = sum(r.encoded_bytes * r.repeats for r in residuals)
  full_bytes = sum(r.nbytes * r.repeats for r in residuals)
  exposed_s = _share_exposed(costs, option, _layers.layer_of(first.name), saved)
  action = "keep" if first.codec is None else "compress"
  if first.on_host:
    action = "offload"
    link = _text.format_seconds(option.to_host_s + option.from_host_s)
    reason = (
      f"Saves {_text.format_bytes(full_bytes)}; of {link} of the link, "
      f"{_text.format_seconds(exposed_s)} show."
    )
  elif first.codec is not None:
    saved_bytes = _text.format_bytes(full_bytes - encoded_bytes)
    coding = _text.format_seconds(option.device_s)
    reason = f"Saves {saved_bytes} for {coding} of coding."
  return _plan.MemoryPlanRow(
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
  costs: _costs.ResidualCosts,
  option: _costs.KeepOption,
  layer: str,
  saved: Sequence[Residual],
) -> float:
  """Returns a residual's share of its layer's exposed transfer seconds."""
  link_s = option.to_host_s + option.from_host_s
  if not link_s:
    return 0.0
  whole = costs.sum_costs(
    [r for r in saved if _layers.layer_of(r.name) == layer]
  )
  exposed_s = float(
    costs.exposed_seconds(layer, whole.to_host_s, whole.from_host_s)
  )
  return exposed_s * link_s / (whole.to_host_s + whole.from_host_s)
