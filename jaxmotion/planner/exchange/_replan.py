"""The advice again, once there are measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxmotion.planner.exchange._plan import ExchangePlan
from jaxmotion.planner.exchange._prices import TensorCosts
from jaxmotion.planner.exchange._problem import ExchangeProblem
from jaxmotion.planner.exchange._scale_platform import (
  slower_codecs,
  slower_device,
  slower_links,
)
from jaxmotion.planner.exchange._solve import solve
from jaxmotion.planner.exchange._table import Table, make_table


def replan(
  plan: ExchangePlan,
  *,
  compute_s: float | None = None,
  coding_s: float | None = None,
  link_s: float | None = None,
  step_s: float | None = None,
) -> ExchangePlan:
  """Advises again, on a platform corrected by what a plan took when it ran.

  Each measurement divided by its prediction is a factor: on all rates and
  times of the device, on the times of all candidates' codecs, on the times of
  the links. Those that were not measured are taken to be as predicted.

  Args:
    plan: that ran.
    compute_s: of a step without any exchange.
    coding_s: of all that the plan's codecs do in a step.
    link_s: of all its collectives.
    step_s: of the whole step, in place of `link_s`: what computing and coding
      do not explain is the links'.

  Returns:
    The plan of what was asked before; its `platform` is the corrected one.

  Raises:
    TypeError: a measurement that is no number.
    ValueError: none is given, one that is not positive, both `link_s` and
      `step_s`, one of something that the plan has not, or a step that is
      shorter than its computing and coding.

  Example:
    >>> import jax
    >>> from jaxmotion import codecs, perfmodel, planner
    >>> w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> own = perfmodel.trace_step(lambda w, x: (x @ w).sum(), w, (w,))
    >>> cluster = perfmodel.builtin_platform("ethernet_1gbit")
    >>> half = [codecs.cast("bfloat16")]
    >>> plan = planner.advise(own, w, (), cluster, candidates=half)
    >>> again = replan(plan, step_s=plan.step.total_s / 2)
    >>> old, new = (p.platform.axis("data").link for p in (plan, again))
    >>> new.rate > old.rate
    True
  """
  given = dict(
    compute_s=compute_s, coding_s=coding_s, link_s=link_s, step_s=step_s
  )
  _check(given)
  request = plan.request
  if compute_s is not None:
    step = plan.step
    factor = compute_s / (step.compute_s + step.update_s + step.call_s)
    request = request.on(slower_device(plan.platform, factor))
  if coding_s is not None:
    table, choice = _table(plan, request)
    predicted = float(table.coding[np.arange(len(choice)), choice].sum())
    factor = _factor("coding_s", coding_s, predicted)
    request = request.on(slower_codecs(request, factor))
  table, choice = _table(plan, request)
  if link_s is not None:
    factor = _factor("link_s", link_s, _link(table, choice))
    request = request.on(slower_links(request, factor))
  if step_s is not None:
    factor = _solve_link(table, choice, step_s)
    request = request.on(slower_links(request, factor))
  return solve(request)


def _check(given: Mapping[str, float | None]) -> None:
  there = {name: v for name, v in given.items() if v is not None}
  if not there:
    raise ValueError(f"`replan` must be given one of {list(given)}, got none.")
  for name, value in there.items():
    message = f"`{name}` must be a positive number of seconds, got {value!r}."
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise TypeError(message)
    if not 0 < value < math.inf:
      raise ValueError(message)
  if "link_s" in there and "step_s" in there:
    raise ValueError(
      f"`step_s` must be None where `link_s` is given, got {there['step_s']!r}."
    )


def _factor(name: str, measured: float, predicted: float) -> float:
  if not predicted:
    raise ValueError(
      f"`{name}` must be None for a plan that has nothing of the kind, got "
      f"{measured!r}."
    )
  return measured / predicted


def _table(
  plan: ExchangePlan, request: ExchangeProblem
) -> tuple[Table, np.ndarray]:
  """The figures of the codecs that a plan has chosen, and which they are."""
  used = list(dict.fromkeys(choice.codec for choice in plan.choices))
  mixed = not all(codec.summable for codec in used)
  table = make_table(
    request.work, TensorCosts(request.route), used, plan.method, mixed=mixed
  )
  return table, np.array([used.index(c.codec) for c in plan.choices])


def _link(table: Table, choice: np.ndarray) -> float:
  """Seconds of all collectives."""
  return math.fsum(
    float(table.link_seconds(table.payload[of, choice[of]].sum(0)))
    for of in map(np.array, table.when.buckets)
  )


def _solve_link(table: Table, choice: np.ndarray, step_s: float) -> float:
  """The factor on the links' times that makes a step so long."""

  def total(factor: float) -> float:
    curves = tuple((sizes, factor * times) for sizes, times in table.curves)
    return dataclasses.replace(table, curves=curves).total(choice)

  if total(0.0) >= step_s:
    raise ValueError(
      "`step_s` must be more than what computing and coding alone are "
      f"predicted to take, {total(0.0):.6g}, got {step_s!r}: give `compute_s` "
      "or `coding_s` too."
    )
  low, high = 0.0, _factor("step_s", step_s, _link(table, choice))
  for _ in range(64):
    middle = (low + high) / 2
    low, high = (middle, high) if total(middle) < step_s else (low, middle)
  return high
