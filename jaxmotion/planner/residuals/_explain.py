"""What a plan does with each residual, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmotion.memory.residuals import Residual
from jaxmotion.planner._text import format_bytes, format_seconds
from jaxmotion.planner.residuals._costs import (
  KeepOption,
  ResidualCosts,
  dropped,
)
from jaxmotion.planner.residuals._enumerate import PlanCandidate
from jaxmotion.planner.residuals._layers import prefix_of
from jaxmotion.planner.residuals._plan import MemoryPlanRow


def rows_of(
  prices: ResidualCosts, draft: PlanCandidate, kept: Sequence[Residual]
) -> Iterator[MemoryPlanRow]:
  """Returns a row for each residual that is kept or computed again."""
  movable = prices.trial(draft.drops).movable
  before = {r.name for r in prices.trial().rows}
  for name in dict.fromkeys(r.name for r in kept):
    own = [r for r in kept if r.name == name]
    why = "It fits." if name in movable else "Small."
    if name not in before:
      why = "Others are computed again from it."
    yield _kept(prices, own, kept, why)
  yield from _computed_again(prices, draft, {r.name for r in kept})


def _computed_again(
  prices: ResidualCosts, draft: PlanCandidate, there: set[str]
) -> Iterator[MemoryPlanRow]:
  """What all of them take together is shared out by their bytes."""
  before = prices.trial()
  gone = [
    r
    for r in before.rows
    if r.name not in there and dropped(r.name, draft.drops)
  ]
  total = sum(r.nbytes * r.repeats for r in gone)
  extra_s = prices.trial(draft.drops).step_s - before.step_s
  for r in gone:
    plain = r.nbytes * r.repeats
    reason = f"Saves {format_bytes(r.encoded_bytes * r.repeats)}."
    took = extra_s * plain / total
    yield MemoryPlanRow(r.name, "recompute", None, plain, 0, 0, took, reason)


def _kept(
  prices: ResidualCosts,
  rows: Sequence[Residual],
  every: Sequence[Residual],
  reason: str,
) -> MemoryPlanRow:
  first = rows[0]
  offer = prices.offered(rows)
  encoded = sum(r.encoded_bytes * r.repeats for r in rows)
  plain = sum(r.nbytes * r.repeats for r in rows)
  exposed_s = _exposed_s(prices, offer, prefix_of(first.name), every)
  action = "keep" if first.codec is None else "compress"
  if first.on_host:
    action = "offload"
    link = format_seconds(offer.put_s + offer.fetch_s)
    reason = (
      f"Saves {format_bytes(plain)}; of {link} of the link, "
      f"{format_seconds(exposed_s)} show."
    )
  elif first.codec is not None:
    saved, coding = (
      format_bytes(plain - encoded),
      format_seconds(offer.device_s),
    )
    reason = f"Saves {saved} for {coding} of coding."
  return MemoryPlanRow(
    first.name,
    action,
    first.codec,
    plain,
    offer.device_bytes,
    encoded - offer.device_bytes,
    offer.device_s + exposed_s,
    reason,
  )


def _exposed_s(
  prices: ResidualCosts,
  offer: KeepOption,
  prefix: str,
  every: Sequence[Residual],
) -> float:
  """A residual's share of what its layer's link adds."""
  own = offer.put_s + offer.fetch_s
  if not own:
    return 0.0
  layer = prices.offered([r for r in every if prefix_of(r.name) == prefix])
  all_s = float(prices.exposed_s(prefix, layer.put_s, layer.fetch_s))
  return all_s * own / (layer.put_s + layer.fetch_s)
