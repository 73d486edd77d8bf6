"""Compiles candidate plans until the fastest one that fits is found.

The compiler needs more or less memory than predicted, by an amount that
changes little between candidates of one front. The excess of the last
compiled candidate therefore says which one to try next; after `_GUESSES`
attempts, bisection bounds the number of compilations.

Temporary buffers dominate where few residuals are kept. Their size depends on
the order of recomputation, which is not modelled: the smallest candidate of
the front need not be the one that compiles to the least. Before a budget is
refused, the smallest candidate of every set of recomputed residuals is
compiled. If one fits, its front is searched as well.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmotion.memory.residuals import Action, Residual, recompute
from jaxmotion.planner.residuals._costs import ResidualCosts
from jaxmotion.planner.residuals._enumerate import PlanCandidate, PlanCandidates
from jaxmotion.planner.residuals._explain import explain_residuals
from jaxmotion.planner.residuals._plan import BudgetTooSmallError, MemoryPlan

MeasureMemory = Callable[..., int]
# Candidates that are chosen by the excess of the last one, before bisection.
_GUESSES = 3
# A share of the step's seconds that is not worth another compilation.
_CLOSE = 0.01


def select_fastest(
  costs: ResidualCosts,
  candidates: PlanCandidates,
  budget_bytes: float,
  measure_memory: MeasureMemory | None,
  notes: tuple[str, ...],
) -> MemoryPlan:
  """Returns the fastest plan that fits.

  Args:
    costs: costs of the function's residuals.
    candidates: fronts of candidates.
    budget_bytes: budget of all device memory.
    measure_memory: compiles a step and returns its bytes; None trusts the
      prediction.
    notes: notes of the plan.

  Raises:
    BudgetTooSmallError: no candidate fits.
  """
  compiler = _PlanCompiler(costs, budget_bytes, measure_memory, notes)
  by_set = sorted(candidates.by_set, key=lambda front: front[-1].step_s)
  others = (front for front in by_set if compiler.fits_budget(front[-1]))
  for front in itertools.chain([candidates.front], others):
    if best := _search_front(compiler, front):
      return best
  raise BudgetTooSmallError(
    budget_bytes, compiler.least_bytes, measure_memory is not None
  )


def _search_front(
  compiler: _PlanCompiler, front: Sequence[PlanCandidate]
) -> MemoryPlan | None:
  """Returns the fastest plan of a front that fits, or None.

  Invariant: candidates before `low` are taken not to fit, and those after
  `high` are predicted to be no faster than the best plan so far.

  Args:
    compiler: makes and measures plans.
    front: candidates, the fastest first; bytes fall along it.
  """
  low, high = 0, len(front) - 1
  best: MemoryPlan | None = None
  guesses = _GUESSES
  while low <= high:
    if best and best.step_s <= (1 + _CLOSE) * front[low].step_s:
      break
    i = (low + high) // 2
    if guesses > 0:
      positions = range(low, high)
      likely = (j for j in positions if compiler.is_likely_to_fit(front[j]))
      i = next(likely, high)
    guesses -= 1
    plan = compiler.make_plan(front[i])
    if compiler.fits_budget(front[i]):
      best = plan if best is None or plan.step_s < best.step_s else best
      high = i - 1
    else:
      low = i + 1
  return best


def _plan_bytes(plan: MemoryPlan) -> int:
  compiled = plan.compiled_bytes
  return plan.predicted_bytes if compiled is None else compiled


class _PlanCompiler:
  """Turns candidates into plans and compiles each different program once.

  Args:
    costs: costs of the function's residuals.
    budget_bytes: budget of all device memory.
    measure_memory: compiles a step and returns its bytes, or None.
    notes: notes of the plans.
  """

  def __init__(
    self,
    costs: ResidualCosts,
    budget_bytes: float,
    measure_memory: MeasureMemory | None,
    notes: tuple[str, ...],
  ):
    self._costs, self._budget_bytes = costs, budget_bytes
    self._measure_memory, self._notes = measure_memory, notes
    self._plans: dict[PlanCandidate, MemoryPlan] = {}
    self._compiled: dict[tuple[Residual, ...], int] = {}
    arrays = costs.argument_bytes + costs.gradient_bytes
    # Bytes of the last plan other than the candidate's residuals.
    self._other_bytes = arrays + costs.temporary_bytes

  @property
  def least_bytes(self) -> int:
    """Least bytes of all plans so far."""
    return min(map(_plan_bytes, self._plans.values()))

  def make_plan(self, candidate: PlanCandidate) -> MemoryPlan:
    """Returns a candidate's plan, compiled if it is to be."""
    if candidate not in self._plans:
      self._plans[candidate] = self._build_plan(candidate)
    plan = self._plans[candidate]
    self._other_bytes = _plan_bytes(plan) - candidate.residual_bytes
    return plan

  def fits_budget(self, candidate: PlanCandidate) -> bool:
    """Returns whether a candidate's plan fits."""
    return _plan_bytes(self.make_plan(candidate)) <= self._budget_bytes

  def is_likely_to_fit(self, candidate: PlanCandidate) -> bool:
    """Returns whether it fits if other bytes are those of the last plan."""
    expected_bytes = self._other_bytes + candidate.residual_bytes
    return expected_bytes <= self._budget_bytes

  def _build_plan(self, candidate: PlanCandidate) -> MemoryPlan:
    costs = self._costs
    rules, residuals = _settle_rules(costs, candidate)
    compiled_bytes = None
    if self._measure_memory is not None:
      # Different patterns that select the same residuals give one program.
      key = tuple(residuals)
      if key not in self._compiled:
        step = jax.value_and_grad(costs.wrap_function(rules))
        measured = _call_measure(self._measure_memory, step, costs.args)
        self._compiled[key] = measured
      compiled_bytes = self._compiled[key]
    return MemoryPlan(
      rules,
      tuple(explain_residuals(costs, candidate, residuals)),
      costs.params,
      self._budget_bytes,
      compiled_bytes,
      costs.argument_bytes,
      costs.gradient_bytes,
      costs.temporary_bytes,
      costs.baseline_s,
      costs.step_seconds(candidate.recomputed, residuals),
      self._notes,
    )


def _settle_rules(
  costs: ResidualCosts, candidate: PlanCandidate
) -> tuple[tuple[tuple[str, Action], ...], list[Residual]]:
  """Returns rules without idle patterns, and the residuals that they save.

  Residuals are chosen by a minimum cut of their bytes. An encoded residual
  weighs less, so that other residuals may be saved than without codecs, and
  some patterns match nothing. These are dropped until all match.
  """
  actions = dict(candidate.actions)
  while True:
    rules: list[tuple[str, Action]] = [
      (f"^{re.escape(name)}$", action) for name, action in actions.items()
    ]
    rules += [
      (pattern, recompute()) for pattern in sorted(candidate.recomputed)
    ]
    residuals = costs.list_residuals(rules)
    names = {r.name for r in residuals}
    if names >= actions.keys():
      return tuple(rules), residuals
    actions = {name: a for name, a in actions.items() if name in names}


def _call_measure(
  measure_memory: MeasureMemory, step: Any, args: Sequence[Any]
) -> int:
  """Returns the bytes that a step takes; raises unless they are a number."""
  try:
    found = measure_memory(step, *args)
  except TypeError as error:
    if type(error) is not TypeError:
      raise
    raise TypeError(
      "`measure_memory` must take (step, params, *batch), got"
      f" {measure_memory!r}: {error}"
    ) from error
  is_number = isinstance(found, int | float | np.integer | np.floating)
  if not is_number or not 0 <= found < math.inf:
    raise TypeError(
      f"`measure_memory` must return a number of bytes, got {found!r:.200}."
    )
  return int(found)
