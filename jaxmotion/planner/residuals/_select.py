"""Compiles candidates until the fastest one that fits is found.

The compiler needs more or less memory than predicted. The ratio changes little
between recipes of one family, so that of the last compiled one corrects the
predictions of the others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmotion.memory import residuals
from jaxmotion.planner import _text
from jaxmotion.planner.residuals import (
  _costs,
  _plan,
  _prices,
  _recipe,
  _search,
)

MeasureMemory = Callable[..., int]
# A share of the step's seconds that is not worth another compilation.
_CLOSE = 0.01
# Programs that are compiled at most.
_MOST_COMPILED = 8
# Candidates whose estimated price is traced at most.
_MOST_SETTLED = 8
# The compiler may need this share of the bytes that are predicted. Before a
# budget is refused, or a slower plan of another family taken, what may fit is
# compiled.
_LEAST_RATIO = 0.8


def select_fastest(
  search: _search.RecipeSearch,
  budget_bytes: float,
  measure_memory: MeasureMemory | None,
  notes: tuple[str, ...] = (),
  source: str = "by `measure_memory`",
) -> _plan.MemoryPlan:
  """Returns the fastest plan that fits."""
  selector = Selector(search, budget_bytes, measure_memory)
  best = selector.find_best()
  if best is None:
    least_bytes = selector.find_least()
    source = source if selector.compiled else "predicted"
    raise _plan.BudgetTooSmallError(budget_bytes, least_bytes, source)
  selector.check_stock()
  prices, recipe = search.prices, best.recipe
  compiled = selector.compiled.get(recipe)
  return _plan.MemoryPlan(
    recipe=recipe,
    device=prices.platform.device,
    rows=tuple(_explain_residuals(prices, recipe)),
    argument_count=len(prices.args),
    budget_bytes=budget_bytes,
    predicted_bytes=int(best.device_bytes),
    compiled_bytes=compiled,
    source=source,
    argument_bytes=prices.argument_bytes,
    gradient_bytes=prices.gradient_bytes,
    state_bytes=prices.state_bytes,
    baseline_s=search.plain.step_s,
    step_s=best.step_s,
    stock=tuple(selector.list_stock()),
    notes=notes,
  )


class Selector:
  """Looks for the fastest candidate that fits."""

  def __init__(
    self,
    search: _search.RecipeSearch,
    budget_bytes: float,
    measure_memory: MeasureMemory | None,
  ):
    self._search, self._budget = search, budget_bytes
    self._measure = measure_memory
    # Bytes that the compiler stated, by recipe.
    self.compiled: dict[_recipe.Recipe, int] = {}
    # How many estimates were replaced by prices of traced steps.
    self._settled = 0
    # Compiled bytes for each predicted one, by family of recipes.
    self._ratio: dict[_Family, float] = {}

  def find_best(self) -> _search.Candidate | None:
    """Returns the fastest candidate that fits, or None."""
    best: _search.Candidate | None = None
    while chosen := self._choose_next(best):
      if chosen.is_estimate:
        self._settled += 1
        self._search.settle(chosen)
      elif self._fits(chosen):
        best = chosen
    return best

  def find_least(self) -> int:
    """Returns the least bytes that a candidate needs."""
    if self._measure is not None and self.compiled:
      return min(self.compiled.values())
    every = self._search.candidates
    return int(min(c.device_bytes for c in every if not c.is_estimate))

  def check_stock(self) -> None:
    """Compiles the fastest stock steps until one fits."""
    for c in self._find_stock():
      is_known = c.recipe in self.compiled or self._search.is_over
      may_fit = self._expect_bytes(c) <= self._budget
      if may_fit and (is_known or self._fits(c)):
        return

  def list_stock(self) -> Iterator[_plan.StockStep]:
    """Yields seconds and bytes of plain training, and of JAX's own policies."""
    for c in self._find_stock():
      expected = self._expect_bytes(c)
      yield _plan.StockStep(
        c.recipe.name,
        c.step_s,
        int(expected),
        expected <= self._budget,
        c.recipe in self.compiled,
      )

  def _find_stock(self) -> list[_search.Candidate]:
    """Returns plain training and JAX's own policies, the fastest first."""
    kinds = "plain", "stock"
    return [c for c in self._search.candidates if c.recipe.kind in kinds]

  def _choose_next(
    self, best: _search.Candidate | None
  ) -> _search.Candidate | None:
    """Returns the candidate to look at next; None if the search is over."""
    is_over = best is not None and self._search.is_over
    if is_over or len(self.compiled) >= _MOST_COMPILED:
      return None
    if self._expect_bytes(self._search.plain) > self._budget:
      self._search.extend()
    ratio = self._ratio.get(_Family("cut", False), 1.0)
    self._search.refine(self._budget / ratio)
    # Recipes of one kind and one price are one program.
    every = self._search.candidates
    tried = {_program_of(c) for c in every if c.recipe in self.compiled}
    left = [c for c in every if _program_of(c) not in tried]
    if self._settled >= _MOST_SETTLED:
      left = [c for c in left if not c.is_estimate]
    if best:
      limit_s = (1 - _CLOSE) * best.step_s
      left = [c for c in left if c.step_s < limit_s]
    for candidate in left:
      if self._expect_bytes(candidate) <= self._budget:
        return None if best and best.recipe == candidate.recipe else candidate
    if self._measure is None:
      return None
    if best:
      # Predicted not to fit, but of a family of which nothing was compiled: it
      # may take less.
      unsure = (
        c
        for c in left
        if not c.is_estimate
        and _family_of(c) not in self._ratio
        and _LEAST_RATIO * c.device_bytes <= self._budget
      )
      return next(unsure, None)
    left.sort(key=self._expect_bytes)
    hopeful = _LEAST_RATIO * self._expect_bytes(left[0]) if left else math.inf
    may_fit = hopeful <= self._budget or not self.compiled
    return left[0] if left and may_fit else None

  def _expect_bytes(self, candidate: _search.Candidate) -> float:
    """Returns compiled bytes, or predicted ones times the ratio so far."""
    if candidate.recipe in self.compiled:
      return self.compiled[candidate.recipe]
    return self._find_ratio(_family_of(candidate)) * candidate.device_bytes

  def _find_ratio(self, own: "_Family") -> float:
    """Returns the ratio of a family, or else that of the nearest one."""
    # What a compiler does with transfers says nothing of recipes without any.
    others = [f for f in self._ratio if not f.is_on_host]
    nearest = (own, own._replace(is_on_host=False), *others)
    return next((self._ratio[f] for f in nearest if f in self._ratio), 1.0)

  def _fits(self, candidate: _search.Candidate) -> bool:
    """Returns whether a candidate fits, compiled if it is to be."""
    if self._measure is None:
      return candidate.device_bytes <= self._budget
    prices, recipe = self._search.prices, candidate.recipe
    prices.report(f"compiling: {recipe.name}")
    nbytes = _call_measure(self._measure, prices.make_step(recipe), prices.args)
    nbytes += prices.state_bytes
    self.compiled[recipe] = nbytes
    self._ratio[_family_of(candidate)] = nbytes / candidate.device_bytes
    fits = nbytes <= self._budget
    words = "fits" if fits else "does not fit"
    prices.report(f"compiled: {_text.format_bytes(nbytes)}, which {words}")
    return fits


class _Family(NamedTuple):
  """Recipes whose memory the compiler exceeds by about the same share."""

  kind: str
  is_on_host: bool


def _family_of(candidate: _search.Candidate) -> _Family:
  """Returns the family whose last compiled recipe corrects a prediction."""
  recipe = candidate.recipe
  return _Family(recipe.kind, recipe.has_offload or recipe.is_on_host)


def _program_of(candidate: _search.Candidate) -> tuple[object, ...]:
  """Returns what is equal for recipes that are taken to be one program."""
  return candidate.recipe.kind, *candidate[1:]


def _call_measure(
  measure_memory: MeasureMemory, step: Any, args: Sequence[Any]
) -> int:
  """Returns the bytes that a step takes; raises unless they are a number."""
  try:
    nbytes = measure_memory(step, *args)
  except TypeError as error:
    if type(error) is not TypeError:
      raise
    raise TypeError(
      "`measure_memory` must take (step, params, *batch), got"
      f" {measure_memory!r}: {error}"
    ) from error
  is_number = isinstance(nbytes, int | float | np.integer | np.floating)
  if not is_number or not 0 <= nbytes < math.inf:
    raise TypeError(
      f"`measure_memory` must return a number of bytes, got {nbytes!r:.200}."
    )
  return int(nbytes)


def _explain_residuals(
  prices: _prices.StepPrices, recipe: _recipe.Recipe
) -> Iterator[_plan.MemoryPlanRow]:
  """Yields a row for each residual that a cut saves or recomputes."""
  if recipe.kind != "cut":
    return
  saved = prices.list_residuals(recipe)
  # What is recomputed is seen beside the cut that recomputes nothing costly.
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
  # Only the seconds of all recomputation are known. They are shared out in
  # proportion to the residuals' bytes.
  added_s = after.step_s - before.step_s - coding_s
  names = {r.name for r in saved}
  recomputed = [r for r in base if r.name not in names]
  total_bytes = sum(r.nbytes * r.repeats for r in recomputed)
  for r in recomputed:
    full_bytes = r.nbytes * r.repeats
    saved_bytes = r.encoded_bytes * r.repeats
    packed = ", packed" if saved_bytes < full_bytes else ""
    reason = f"Saves {_text.format_bytes(saved_bytes)}{packed}."
    seconds = added_s * full_bytes / total_bytes
    yield _plan.MemoryPlanRow(
      r.name, "recompute", None, full_bytes, 0, 0, seconds, reason
    )


def _explain_saved(
  costs: _costs.ResidualCosts,
  own: Sequence[residuals.Residual],
  saved: Sequence[residuals.Residual],
  reason: str,
) -> _plan.MemoryPlanRow:
  """Returns the row of the residuals of one name."""
  # own: these residuals. saved: all that the recipe saves.
  first = own[0]
  option = costs.sum_costs(own)
  encoded_bytes = sum(r.encoded_bytes * r.repeats for r in own)
  full_bytes = sum(r.nbytes * r.repeats for r in own)
  # Transfers of a layer hide in its time together. What does not hide is shared
  # out in proportion to the seconds on the link.
  exposed_s, link_s = 0.0, option.to_host_s + option.from_host_s
  if link_s:
    layer = _costs.layer_of(first.name)
    of_layer = [r for r in saved if _costs.layer_of(r.name) == layer]
    whole = costs.sum_costs(of_layer)
    exposed_s = costs.transfer_seconds(of_layer) * link_s
    exposed_s /= whole.to_host_s + whole.from_host_s
  action = "keep" if first.codec is None else "compress"
  if first.on_host:
    action = "offload"
    link = _text.format_seconds(link_s)
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
