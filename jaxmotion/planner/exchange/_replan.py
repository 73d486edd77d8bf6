"""Public API: `replan`, which corrects a plan by measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from jaxmotion import core
from jaxmotion.planner import _checks
from jaxmotion.planner.exchange import (
  _plan,
  _prices,
  _problem,
  _scale_platform,
  _solve,
  _table,
)

_MOST_S = 1e6  # Seconds that a part of a step may take: eleven days.


def replan(
  plan: _plan.ExchangePlan,
  *,
  compute_s: float | None = None,
  coding_s: float | None = None,
  link_s: float | None = None,
  step_s: float | None = None,
) -> _plan.ExchangePlan:
  """Solves a plan's problem again on a platform corrected by measurements.

  Each measurement divided by its prediction is a factor. It is on all rates and
  times of the device, on the times of all candidate codecs, or on those of the
  links. Figures that were not measured stay as predicted.

  Args:
    plan: the plan that ran.
    compute_s: seconds of a step without any exchange.
    coding_s: seconds of all that the plan's codecs do in a step.
    link_s: seconds of all collectives of a step.
    step_s: seconds of the whole step, instead of `link_s`: what computation
      and coding do not explain is attributed to the links.

  Returns:
    The new plan; its `platform` is the corrected one.

  Raises:
    TypeError: a measurement is not a number.
    ValueError: no measurement is given, one is not positive, or `link_s` and
      `step_s` are both given. The plan has nothing of the measured kind, or the
      step is shorter than its computation and coding.

  Example:
    >>> import jax
    >>> from jaxmotion import codecs, perfmodel, planner
    >>> w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> traced = perfmodel.trace_step(lambda w, x: (x @ w).sum(), w, (w,))
    >>> cluster = perfmodel.builtin_platform("ethernet_1gbit")
    >>> half = [codecs.cast("bfloat16")]
    >>> plan = planner.advise(traced, w, (), cluster, candidates=half)
    >>> corrected = replan(plan, step_s=plan.step.total_s / 2)
    >>> old, new = (p.platform.axis("data").link for p in (plan, corrected))
    >>> new.rate > old.rate
    True
  """
  core.check_instance(
    "plan", plan, _plan.ExchangePlan, "what `advise` returned"
  )
  given = dict(
    compute_s=compute_s, coding_s=coding_s, link_s=link_s, step_s=step_s
  )
  _check_measurements(given)
  problem = plan.problem
  if compute_s is not None:
    step = plan.step
    factor = compute_s / (step.compute_s + step.update_s + step.call_s)
    with _name_measurement("compute_s", compute_s):
      problem = problem.on_platform(
        _scale_platform.scale_device(plan.platform, factor)
      )
  if coding_s is not None:
    table, choice = table_of_plan(plan, problem)
    predicted = float(table.coding_s[np.arange(len(choice)), choice].sum())
    factor = _measured_factor("coding_s", coding_s, predicted)
    with _name_measurement("coding_s", coding_s):
      problem = problem.on_platform(
        _scale_platform.scale_codecs(problem, factor)
      )
  table, choice = table_of_plan(plan, problem)
  if link_s is not None:
    predicted = sum_link_seconds(table, choice)
    factor = _measured_factor("link_s", link_s, predicted)
    with _name_measurement("link_s", link_s):
      problem = problem.on_platform(
        _scale_platform.scale_links(problem, factor)
      )
  if step_s is not None:
    factor = _solve_link_factor(table, choice, step_s)
    with _name_measurement("step_s", step_s):
      problem = problem.on_platform(
        _scale_platform.scale_links(problem, factor)
      )
  return _solve.solve_exchange(problem)


def _check_measurements(given: Mapping[str, float | None]) -> None:
  measured = {name: v for name, v in given.items() if v is not None}
  if not measured:
    raise ValueError(f"`replan` must be given one of {list(given)}, got none.")
  for name, value in measured.items():
    _checks.check_positive(name, value, _MOST_S)
  if "link_s" in measured and "step_s" in measured:
    raise ValueError(
      "`step_s` must be None where `link_s` is given, got "
      f"{measured['step_s']!r}."
    )


@contextlib.contextmanager
def _name_measurement(name: str, measured: float) -> Iterator[None]:
  """Names the measurement that no platform explains."""
  try:
    yield
  except ValueError as error:
    raise ValueError(
      f"`{name}` must be what a platform can take, got {measured!r}, with"
      f" which {error}"
    ) from error


def _measured_factor(name: str, measured: float, predicted: float) -> float:
  if not predicted:
    raise ValueError(
      f"`{name}` must be None for a plan that has nothing of the kind, got "
      f"{measured!r}."
    )
  return measured / predicted


def table_of_plan(
  plan: _plan.ExchangePlan, problem: _problem.ExchangeProblem
) -> tuple[_table.StepTable, np.ndarray]:
  """Returns the costs of a plan's codecs, and int[tensors] their positions."""
  used = list(dict.fromkeys(choice.codec for choice in plan.choices))
  mixed = not all(codec.summable for codec in used)
  table = _table.make_table(
    _prices.TensorCosts(problem), used, plan.method, mixed=mixed
  )
  return table, np.array([used.index(c.codec) for c in plan.choices])


def sum_link_seconds(table: _table.StepTable, choice: np.ndarray) -> float:
  """Returns the seconds of all collectives of a step."""
  return math.fsum(
    float(table.link_seconds(table.payload[tensors, choice[tensors]].sum(0)))
    for tensors in map(np.array, table.schedule.buckets)
  )


def _solve_link_factor(
  table: _table.StepTable, choice: np.ndarray, step_s: float
) -> float:
  """Returns the factor on link times that makes a step take `step_s`."""
  # The step grows monotonically with the factor. It is found by bisection,
  # between 0 and the factor that would make the links alone take `step_s`.

  def predict(factor: float) -> float:
    curves = tuple((sizes, factor * times) for sizes, times in table.curves)
    return dataclasses.replace(table, curves=curves).total_seconds(choice)

  if predict(0.0) >= step_s:
    raise ValueError(
      "`step_s` must be more than what computing and coding alone are "
      f"predicted to take, {predict(0.0):.6g}, got {step_s!r}: give "
      "`compute_s` or `coding_s` too."
    )
  predicted = sum_link_seconds(table, choice)
  low, high = 0.0, _measured_factor("step_s", step_s, predicted)
  for _ in range(64):
    middle = (low + high) / 2
    low, high = (middle, high) if predict(middle) < step_s else (low, middle)
  return high
