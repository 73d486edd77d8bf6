"""Plans of `planner.fit_memory` for models, beside plans made by hand."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.models.losses import parse_task
from experiments.residuals import measure
from experiments.residuals.cases import StepProgram
from experiments.residuals.policies import (
  Policy,
  is_exact,
  list_policies,
  make_budget,
)
from jaxmotion import codecs, memory, perfmodel, planner

OPTIONS = {
  "exact": (memory.recompute(),),
  "rounded": (
    codecs.uniform(bits=8, block=64),
    codecs.uniform(bits=4, block=64),
    memory.recompute(),
  ),
}
"""Options of `fit_memory` by name."""

# Budgets of `compress_residuals` by hand, beside those of `list_policies`.
_SHARES = (0.9, 0.6, 0.4, 0.3, 0.15, 0.05)


class HandPlan(NamedTuple):
  """A plan made by hand, with its prediction.

  Attributes:
    policy: the plan.
    step_s: predicted seconds of a step.
    device_bytes: predicted bytes on the device.
  """

  policy: Policy
  step_s: float
  device_bytes: float


class MemoryFit(NamedTuple):
  """A plan for a model and a budget, beside the best plan made by hand.

  Attributes:
    model: name of the model.
    options: name of the options.
    budget_bytes: the budget.
    plan: the plan; None if there is none.
    least_bytes: least bytes of any plan; None with `plan`.
    by_hand: fastest plan made by hand that fits; None if none does.
    hand_count: number of plans made by hand.
    compilations: programs that `fit_memory` compiled.
    fit_s: seconds that it took.
  """

  model: str
  options: str
  budget_bytes: float
  plan: planner.MemoryPlan | None
  least_bytes: float | None
  by_hand: HandPlan | None
  hand_count: int
  compilations: int
  fit_s: float


def fit_model(
  model: str,
  options: str,
  depths: Sequence[float],
  target: str | None,
) -> Iterator[MemoryFit]:
  """Yields the plans of a model for several budgets.

  Args:
    model: name of the model and its options, as `parse_task` takes them.
    options: key of `OPTIONS`.
    depths: budgets: 0 is what plain training takes, 1 the least that a plan
      made by hand takes, and between them lie their geometric means.
    target: device to compile for, a key of `measure.TARGETS`; None compiles
      nothing and trusts the predictions.
  """
  task = parse_task(model)()
  platform = perfmodel.builtin_platform(measure.TARGETS[target or "h100"])
  plans = sorted(
    _predict_plans(model, options, platform), key=lambda plan: plan.step_s
  )
  plain = next(p.device_bytes for p in plans if p.policy.name == "plain")
  least = min(p.device_bytes for p in plans)
  compiler = _Compiler(target)
  for depth in depths:
    budget = plain ** (1 - depth) * least**depth
    before, begin = compiler.count, time.monotonic()
    plan, least_bytes = None, None
    try:
      plan = planner.fit_memory(
        task.loss_fn,
        task.params,
        (task.batch,),
        platform,
        budget,
        options=OPTIONS[options],
        measure_memory=compiler.measure if target else None,
        progress=lambda line: print(f"  {line}", flush=True),
      )
    except planner.BudgetTooSmallError as error:
      least_bytes = error.least_bytes
    used_s, count = time.monotonic() - begin, compiler.count - before
    by_hand = compiler.find_fastest(plans, budget, plan)
    yield MemoryFit(
      model,
      options,
      budget,
      plan,
      least_bytes,
      by_hand,
      len(plans),
      count,
      used_s,
    )


def _predict_plans(
  model: str, options: str, platform: perfmodel.Platform
) -> Iterator[HandPlan]:
  """Yields the plans made by hand, predicted as `fit_memory` does it."""
  make_task = parse_task(model)
  policies = list_policies(make_task)
  policies += [make_budget(make_task(), share) for share in _SHARES]
  for policy in policies:
    if options == "exact" and not is_exact(policy.name):
      continue
    step = policy.build_step()
    cost = perfmodel.predict_cost(step.fn, *step.args, while_trips=1)
    step_s = perfmodel.predict_seconds(cost, platform.device)
    yield HandPlan(policy, step_s, cost.peak_bytes)


class _Compiler:
  """Compiles steps, and remembers what plans made by hand take.

  Args:
    target: device to compile for; None compiles nothing.

  Attributes:
    count: programs compiled for `fit_memory`.
  """

  # What is predicted to take more than this share of the budget does not fit.
  _MOST_SHARE = 1.15

  def __init__(self, target: str | None):
    self._target, self.count = target, 0
    self._known: dict[str, float] = {}

  def measure(self, fn: Any, *args: Any) -> int:
    """Returns the bytes of a step, for `fit_memory`."""
    self.count += 1
    return self._compile(StepProgram(fn, args))

  def find_fastest(
    self,
    plans: Sequence[HandPlan],
    budget: float,
    ours: planner.MemoryPlan | None,
  ) -> HandPlan | None:
    """Returns the fastest plan by hand that fits.

    Plans that are slower than ours are not compiled: the first of them that is
    predicted to fit stands for all.

    Args:
      plans: plans made by hand, the fastest first.
      budget: the budget, bytes.
      ours: the plan of `fit_memory`.
    """
    for plan in plans:
      is_faster = ours is None or plan.step_s < ours.step_s
      nbytes = plan.device_bytes
      if self._target is not None and is_faster:
        is_hopeless = nbytes > self._MOST_SHARE * budget
        nbytes = nbytes if is_hopeless else self._measure_plan(plan)
      if nbytes <= budget:
        return plan
    return None

  def _measure_plan(self, plan: HandPlan) -> float:
    name = plan.policy.name
    if name not in self._known:
      print(f"  compiling by hand: {name}", flush=True)
      self._known[name] = self._compile(plan.policy.build_step())
    return self._known[name]

  def _compile(self, step: StepProgram) -> int:
    assert self._target is not None
    return measure.compile_step(step, self._target).device_bytes
