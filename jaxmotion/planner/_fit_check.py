"""Drafts of plans made exact, compiled, compared with the budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxmotion.memory.residuals import Action, Residual, recompute
from jaxmotion.planner._fit_plan import DoesNotFit, FitPlan
from jaxmotion.planner._fit_price import Prices
from jaxmotion.planner._fit_rows import rows_of
from jaxmotion.planner._fit_search import Draft

Check = Callable[..., int]
# What is compiled is chosen by what the last one needed more than predicted;
# after so many, by halves.
_GUESSES = 3
# Of a step's seconds, what is not worth another compilation.
_CLOSE = 0.01


def cheapest(
  prices: Prices,
  found: tuple[Sequence[Draft], Sequence[Draft]],
  budget_bytes: float,
  check: Check | None,
  notes: tuple[str, ...],
) -> FitPlan:
  """Returns the fastest plan that fits.

  Args:
    prices: of the function.
    found: drafts, the fastest first, and those that must be tried before
      saying that none fits.
    budget_bytes: of all memory.
    check: compiles a step; None trusts the prediction.
    notes: of the plan.

  Raises:
    DoesNotFit: none fits.
  """
  ordered, extremes = found
  maker = _Maker(prices, budget_bytes, check, notes)
  low, high = 0, len(ordered) - 1
  best: FitPlan | None = None
  more = 0
  while low <= high:
    if best and best.step_s <= (1 + _CLOSE) * ordered[low].step_s:
      break
    room = budget_bytes - maker.fixed_bytes - more
    i = (low + high) // 2
    if maker.made < _GUESSES:
      fits = (j for j in range(low, high) if ordered[j].nbytes <= room)
      i = next(fits, high)
    plan = maker.plan(ordered[i])
    more = _bytes(plan) - maker.fixed_bytes - ordered[i].nbytes
    if _bytes(plan) <= budget_bytes:
      best = plan if best is None or plan.step_s < best.step_s else best
      high = i - 1
    else:
      low = i + 1
  return best or maker.last(extremes)


def _bytes(plan: FitPlan) -> int:
  compiled = plan.compiled_bytes
  return plan.predicted_bytes if compiled is None else compiled


class _Maker:
  """Makes plans of drafts."""

  def __init__(
    self,
    prices: Prices,
    budget_bytes: float,
    check: Check | None,
    notes: tuple[str, ...],
  ):
    self._prices, self._budget_bytes = prices, budget_bytes
    self._check, self._notes = check, notes
    self._plans: dict[Draft, FitPlan] = {}
    given = prices.argument_bytes + prices.gradient_bytes
    self.fixed_bytes = given + prices.working_bytes

  @property
  def made(self) -> int:
    """Plans so far."""
    return len(self._plans)

  def last(self, extremes: Iterable[Draft]) -> FitPlan:
    """Returns the first of these that fits."""
    for draft in extremes:
      if _bytes(plan := self.plan(draft)) <= self._budget_bytes:
        return plan
    least = min(map(_bytes, self._plans.values()))
    raise DoesNotFit(self._budget_bytes, least, self._check is not None)

  def plan(self, draft: Draft) -> FitPlan:
    """Returns a draft's plan."""
    if draft not in self._plans:
      self._plans[draft] = self._make(draft)
    return self._plans[draft]

  def _make(self, draft: Draft) -> FitPlan:
    prices = self._prices
    rules, kept = _settled(prices, draft)
    compiled = None
    if self._check is not None:
      step = jax.value_and_grad(prices.wrap(rules))
      compiled = self._check(step, *prices.args)
    return FitPlan(
      rules,
      tuple(rows_of(prices, draft, kept)),
      prices.params,
      self._budget_bytes,
      compiled,
      prices.argument_bytes,
      prices.gradient_bytes,
      prices.working_bytes,
      prices.plain_s,
      prices.step_s(draft.drops, kept),
      self._notes,
    )


def _settled(
  prices: Prices, draft: Draft
) -> tuple[tuple[tuple[str, Action], ...], list[Residual]]:
  """Returns rules of which each is for something, and what they keep.

  What is encoded weighs less, so that something else may be kept than when
  nothing is.
  """
  picks = dict(draft.picks)
  while True:
    rules: list[tuple[str, Action]] = [
      (f"^{re.escape(name)}$", action) for name, action in picks.items()
    ]
    rules += [(pattern, recompute()) for pattern in sorted(draft.drops)]
    kept = prices.kept(rules)
    there = {r.name for r in kept}
    if there >= picks.keys():
      return tuple(rules), kept
    picks = {name: a for name, a in picks.items() if name in there}
