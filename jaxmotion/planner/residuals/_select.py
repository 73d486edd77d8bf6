"""Drafts of plans made exact, compiled, compared with the budget."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import jax

from jaxmotion.memory.residuals import Action, Residual, recompute
from jaxmotion.planner.residuals._costs import ResidualCosts
from jaxmotion.planner.residuals._enumerate import PlanCandidate, PlanCandidates
from jaxmotion.planner.residuals._explain import rows_of
from jaxmotion.planner.residuals._plan import BudgetTooSmallError, MemoryPlan

Check = Callable[..., int]
# What is compiled is chosen by what the last one needed more than predicted;
# after so many, by halves.
_GUESSES = 3
# Of a step's seconds, what is not worth another compilation.
_CLOSE = 0.01


def select_fastest(
  prices: ResidualCosts,
  found: PlanCandidates,
  budget_bytes: float,
  check: Check | None,
  notes: tuple[str, ...],
) -> MemoryPlan:
  """Returns the fastest plan that fits.

  Args:
    prices: of the function.
    found: drafts.
    budget_bytes: of all memory.
    check: compiles a step; None trusts the prediction.
    notes: of the plan.

  Raises:
    BudgetTooSmallError: none fits.
  """
  maker = _PlanCompiler(prices, budget_bytes, check, notes)
  # What is alive at work depends on what is computed again, and decides where
  # little is kept.
  by_drops = sorted(found.by_drops, key=lambda own: own[-1].step_s)
  others = (own for own in by_drops if maker.fits(own[-1]))
  for ordered in itertools.chain([found.all_of], others):
    if best := _search(maker, ordered):
      return best
  raise BudgetTooSmallError(budget_bytes, maker.least_bytes, check is not None)


def _search(
  maker: _PlanCompiler, ordered: Sequence[PlanCandidate]
) -> MemoryPlan | None:
  """Returns the fastest that fits, of drafts with the fastest first."""
  low, high = 0, len(ordered) - 1
  best: MemoryPlan | None = None
  guesses = _GUESSES
  while low <= high:
    if best and best.step_s <= (1 + _CLOSE) * ordered[low].step_s:
      break
    i = (low + high) // 2
    if guesses > 0:
      seems = (j for j in range(low, high) if maker.seems_to_fit(ordered[j]))
      i = next(seems, high)
    guesses -= 1
    plan = maker.plan(ordered[i])
    if maker.fits(ordered[i]):
      best = plan if best is None or plan.step_s < best.step_s else best
      high = i - 1
    else:
      low = i + 1
  return best


def _bytes(plan: MemoryPlan) -> int:
  compiled = plan.compiled_bytes
  return plan.predicted_bytes if compiled is None else compiled


class _PlanCompiler:
  """Makes plans of drafts."""

  def __init__(
    self,
    prices: ResidualCosts,
    budget_bytes: float,
    check: Check | None,
    notes: tuple[str, ...],
  ):
    self._prices, self._budget_bytes = prices, budget_bytes
    self._check, self._notes = check, notes
    self._plans: dict[PlanCandidate, MemoryPlan] = {}
    self._compiled: dict[tuple[Residual, ...], int] = {}
    given = prices.argument_bytes + prices.gradient_bytes
    # What the last plan took besides its residuals.
    self._others = given + prices.working_bytes

  @property
  def least_bytes(self) -> int:
    """Of all plans so far."""
    return min(map(_bytes, self._plans.values()))

  def plan(self, draft: PlanCandidate) -> MemoryPlan:
    """Returns a draft's plan."""
    if draft not in self._plans:
      self._plans[draft] = self._make(draft)
    self._others = _bytes(self._plans[draft]) - draft.nbytes
    return self._plans[draft]

  def fits(self, draft: PlanCandidate) -> bool:
    """Whether a draft's plan fits."""
    return _bytes(self.plan(draft)) <= self._budget_bytes

  def seems_to_fit(self, draft: PlanCandidate) -> bool:
    """Whether it would, if the rest took what it took in the last plan."""
    return self._others + draft.nbytes <= self._budget_bytes

  def _make(self, draft: PlanCandidate) -> MemoryPlan:
    prices = self._prices
    rules, kept = _settled(prices, draft)
    compiled = None
    if self._check is not None:
      # Patterns that choose the same make the same program.
      key = tuple(kept)
      if key not in self._compiled:
        step = jax.value_and_grad(prices.wrap(rules))
        self._compiled[key] = self._check(step, *prices.args)
      compiled = self._compiled[key]
    return MemoryPlan(
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
  prices: ResidualCosts, draft: PlanCandidate
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
