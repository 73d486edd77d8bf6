"""Plans that `planner.fit_memory` makes of a network under memory budgets."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from experiments.residuals import cases, measure, networks
from jaxmotion import memory, perfmodel, planner

_OPTIONS = (
  cases.INT8,
  memory.offload(),
  memory.offload(cases.INT8),
  memory.recompute(),
)


class BudgetPlan(NamedTuple):
  """A memory budget of a network, and its plan beside plain training.

  Attributes:
    spec: the network and its batch.
    share: budget relative to the device memory of plain training.
    budget_bytes: the budget.
    plain_memory: memory of plain training.
    plain_s: predicted seconds of a plain step.
    plan: the fastest plan within the budget; None if no plan fits.
    least_bytes: smallest budget that a plan fits; None with `plan`.
  """

  spec: networks.NetworkSpec
  share: float
  budget_bytes: float
  plain_memory: measure.StepMemory
  plain_s: float
  plan: planner.MemoryPlan | None
  least_bytes: float | None


def fit_budgets(
  spec: networks.NetworkSpec, shares: Sequence[float], target: str
) -> Iterator[BudgetPlan]:
  """Yields the plan of a network for each memory budget."""
  # A residual may be kept, rounded to 8 bits, offloaded to the host exactly or
  # rounded, or recomputed. The planner sees the whole loss as one function.
  net = spec.make_network()
  plain = cases.build_step("plain", net, spec.batch)
  plain_memory = measure.compile_step(plain, target)
  plain_s = measure.predict_figures(plain, 0, target).step_s

  def measure_memory(fn: Any, *args: Any) -> int:
    step = cases.StepProgram(fn, args)
    return measure.compile_step(step, target).device_bytes

  for share in shares:
    budget = share * plain_memory.device_bytes
    plan, least_bytes = None, None
    try:
      plan = planner.fit_memory(
        lambda p, *b: net.loss(p, b),
        net.params,
        net.batch(spec.batch),
        perfmodel.builtin_platform(measure.TARGETS[target]),
        budget,
        options=_OPTIONS,
        measure_memory=measure_memory,
      )
    except planner.BudgetTooSmallError as error:
      least_bytes = error.least_bytes
    yield BudgetPlan(
      spec, share, budget, plain_memory, plain_s, plan, least_bytes
    )
