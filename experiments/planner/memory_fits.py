"""Plans of `planner.fit_memory` for models, beside plans made by hand."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.planner import hand_plans
from experiments.residuals import cases, measure
from jaxmotion import perfmodel, planner


class MemoryFit(NamedTuple):
  """A plan for a model and a budget, beside the best plan made by hand.

  Attributes:
    model: name of the model.
    options: name of the options.
    budget_bytes: the budget.
    plan: the plan; None if there is none.
    least_bytes: least bytes of any plan; None with `plan`.
    by_hand: fastest plan made by hand that fits; None if none does.
    hand_bytes: compiled bytes of that plan; None if it was not compiled.
    hand_count: number of plans made by hand.
    compilations: programs that `fit_memory` compiled.
    fit_s: processor seconds that it took.
  """

  model: str
  options: str
  budget_bytes: float
  plan: planner.MemoryPlan | None
  least_bytes: float | None
  by_hand: hand_plans.HandPlan | None
  hand_bytes: float | None
  hand_count: int
  compilations: int
  fit_s: float


def fit_model(
  hand: hand_plans.HandPlans, depths: Sequence[float]
) -> Iterator[MemoryFit]:
  """Yields the plans of a model for several budgets."""
  task, store = hand.task, hand.store
  platform = perfmodel.builtin_platform(measure.TARGETS[hand.target])
  smallest = min(hand.plans, key=lambda p: p.device_bytes)
  plain = hand.find_bytes(hand.find_plan("plain"))
  least = hand.find_bytes(smallest)

  def measure_memory(fn: Any, *args: Any) -> int:
    assert store is not None
    return store.compile(cases.StepProgram(fn, args)).device_bytes

  for depth in depths:
    budget = plain ** (1 - depth) * least**depth
    counted = (store.count, store.known_s) if store else (0, 0.0)
    begin = measure.processor_seconds()
    plan, least_bytes = None, None
    try:
      plan = planner.fit_memory(
        task.loss_fn,
        task.params,
        (task.batch,),
        platform,
        budget,
        options=hand_plans.OPTIONS[hand.options],
        measure_memory=measure_memory if store else None,
        progress=lambda line: print(f"  {line}", flush=True),
      )
    except planner.BudgetTooSmallError as error:
      least_bytes = error.least_bytes
    fit_s = measure.processor_seconds() - begin
    count = 0
    if store is not None:
      count = store.count - counted[0]
      fit_s += store.known_s - counted[1]
    most_s = plan.step_s if plan else math.inf
    by_hand = hand.find_fastest(budget, most_s)
    yield MemoryFit(
      hand.model,
      hand.options,
      budget,
      plan,
      least_bytes,
      by_hand,
      hand.known_bytes(by_hand) if by_hand else None,
      len(hand.plans),
      count,
      fit_s,
    )
