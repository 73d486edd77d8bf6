"""What `planner.fit_memory` makes of a network under budgets of memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from experiments.common import records
from experiments.residuals import cases, measure
from experiments.residuals.points import Spec
from jaxmotion import memory, perfmodel, planner

_OPTIONS = (
  cases.INT8,
  memory.offload(),
  memory.offload(cases.INT8),
  memory.recompute(),
)


def rows(
  experiment: str, spec: Spec, shares: Sequence[float], target: str
) -> Iterator[records.Row]:
  """Rows of the plan for each budget, beside plain training.

  Residuals may be kept, rounded to 8 bits, sent to the host as they are or
  rounded, and computed again. The whole loss is one function to the planner.

  Args:
    experiment: what rows say that they are of.
    spec: the network.
    shares: budgets, of what the device holds in plain training.
    target: to compile for.
  """
  net = spec.make()
  plain = cases.job("plain", net, spec.batch)
  whole = measure.compile_step(plain, target)
  usual = measure.predict(plain, 0, target).step_s

  def measure_memory(step: Any, *args: Any) -> int:
    job = cases.Job(step, args)
    return measure.compile_step(job, target).device_bytes

  for share in shares:
    budget = share * whole.device_bytes
    case = f"{spec.case}/budget_{100 * share:g}%"
    say = lambda metric, value, unit, base=None, case=case: records.Row(
      experiment,
      case,
      metric,
      value,
      unit,
      base,
      None if base is None else value / base,
      None,
      f"{whole.machine}; predicted from datasheets",
      jax.__version__,
    )
    yield say("budget_bytes", budget, "bytes", whole.device_bytes)
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
      yield say("least_bytes", error.least_bytes, "bytes", whole.device_bytes)
      continue
    compiled = float(plan.compiled_bytes or 0)
    yield say("device_bytes", compiled, "bytes", whole.device_bytes)
    yield say("device_bytes_predicted", plan.predicted_bytes, "bytes", compiled)
    yield say("step_ms_predicted", 1e3 * plan.step_s, "ms", 1e3 * usual)
    for action in ("keep", "compress", "offload", "recompute"):
      count = sum(row.action == action for row in plan.rows)
      yield say(f"{action}_residuals", count, "residuals")
