"""The advice again, once there are measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np

from jaxmotion.codecs import Codec
from jaxmotion.perfmodel import (
  Curve,
  Device,
  Link,
  Platform,
  Rate,
  decode_seconds,
  encode_seconds,
)
from jaxmotion.planner._plan import Plan
from jaxmotion.planner._request import Request
from jaxmotion.planner._solve import solve
from jaxmotion.planner._table import Prices, Table, make_table
from jaxmotion.wire import row_like

_CODING = ("encode", "decode", "add")
_LEAST_S = 1e-12  # Curves have no zeros.


def replan(
  plan: Plan,
  *,
  compute_s: float | None = None,
  coding_s: float | None = None,
  link_s: float | None = None,
  step_s: float | None = None,
) -> Plan:
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
    >>> from jaxmotion import codecs, perfmodel, planner
    >>> w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> own = perfmodel.work(lambda w, x: (x @ w).sum(), w, w)
    >>> cluster = perfmodel.shipped("ethernet_1gbit")
    >>> half = [codecs.cast("bfloat16")]
    >>> plan = planner.advise(own, w, cluster, candidates=half)
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
    request = request.on(_slower_device(plan.platform, factor))
  if coding_s is not None:
    table, choice = _table(plan, request)
    predicted = float(table.coding[np.arange(len(choice)), choice].sum())
    request = request.on(
      _slower_codecs(request, _factor(coding_s, predicted, "coding_s"))
    )
  if link_s is not None:
    table, choice = _table(plan, request)
    request = request.on(
      _slower_links(request, _factor(link_s, _link(table, choice), "link_s"))
    )
  if step_s is not None:
    table, choice = _table(plan, request)
    request = request.on(
      _slower_links(request, _solve_link(table, choice, step_s))
    )
  return solve(request)


def _check(given: Mapping[str, float | None]) -> None:
  there = {name: v for name, v in given.items() if v is not None}
  if not there:
    raise ValueError(f"`replan` must be given one of {list(given)}, got none.")
  for name, value in there.items():
    message = f"`{name}` must be a positive number of seconds, got {value!r}."
    if type(value) not in (int, float):
      raise TypeError(message)
    if not 0 < value < math.inf:
      raise ValueError(message)
  if "link_s" in there and "step_s" in there:
    raise ValueError(
      f"`step_s` must be None where `link_s` is given, got {there['step_s']!r}."
    )


def _factor(measured: float, predicted: float, name: str) -> float:
  if not predicted:
    raise ValueError(
      f"`{name}` must be None for a plan that has nothing of the kind, got "
      f"{measured!r}."
    )
  return measured / predicted


def _table(plan: Plan, request: Request) -> tuple[Table, np.ndarray]:
  """The figures of the codecs that a plan has chosen, and which they are."""
  used = list(dict.fromkeys(choice.codec for choice in plan.choices))
  mixed = not all(codec.summable for codec in used)
  table = make_table(
    request.work, Prices(request.route), used, plan.method, mixed=mixed
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
  low, high = 0.0, _factor(step_s, _link(table, choice), "step_s")
  for _ in range(64):
    middle = (low + high) / 2
    low, high = (middle, high) if total(middle) < step_s else (low, middle)
  return high


def _slower_device(platform: Platform, factor: float) -> Platform:
  device = platform.device
  return dataclasses.replace(
    platform,
    device=dataclasses.replace(
      device,
      matmul_flops_per_s={
        dtype: rate / factor
        for dtype, rate in device.matmul_flops_per_s.items()
      },
      vector_flops_per_s=device.vector_flops_per_s / factor,
      memory_rate=Rate(bytes_per_s=device.memory_rate.bytes_per_s / factor),
      kernel_s=device.kernel_s * factor,
      call_s=device.call_s * factor,
      # Measured codecs are as fast as they were measured to be.
      measured={
        name: curve if name.split()[0] in _CODING else _slower(curve, factor)
        for name, curve in device.measured.items()
      },
    ),
  )


def _slower(curve: Curve, factor: float) -> Curve:
  return dataclasses.replace(
    curve, seconds=tuple(factor * s for s in curve.seconds)
  )


def _slower_links(request: Request, factor: float) -> Platform:
  route = request.route

  def slower(link: Link) -> Link:
    return dataclasses.replace(
      link,
      latency_s=link.latency_s * factor,
      rate=Rate(bytes_per_s=link.rate.bytes_per_s / factor),
      measured={k: _slower(c, factor) for k, c in link.measured.items()},
    )

  axes = tuple(
    dataclasses.replace(axis, link=slower(axis.link))
    if axis.name in (route.axis, route.within)
    else axis
    for axis in route.platform.axes
  )
  return dataclasses.replace(route.platform, axes=axes)


def _slower_codecs(request: Request, factor: float) -> Platform:
  """Gives every candidate curves, exact at the sizes of the tensors."""
  platform, likes = request.route.platform, jax.tree.leaves(request.exchanged())
  sizes = {like.size for like in likes}
  sizes |= {row_like(like, request.workers).size for like in likes}
  curves = dict(platform.device.measured)
  for codec in request.candidates:
    curves |= _curves(codec, sizes - {0}, platform.device, factor)
  device = dataclasses.replace(platform.device, measured=curves)
  return dataclasses.replace(platform, device=device)


def _curves(
  codec: Codec, sizes: set[int], device: Device, factor: float
) -> dict[str, Curve]:
  def add(n: int) -> float:
    one, two = (decode_seconds(codec, n, k, device) for k in (1, 2))
    return two - one

  times = (
    lambda n: encode_seconds(codec, n, device),
    lambda n: decode_seconds(codec, n, 1, device),
    add,
  )
  curves = {}
  for do, time in zip(_CODING, times, strict=True):
    name = f"{do} {codec!r}"
    old = device.measured.get(name)
    every = sorted({*sizes, *(map(int, old.sizes) if old else ())})
    curves[name] = Curve(
      sizes=tuple(every),
      seconds=tuple(max(factor * time(n), _LEAST_S) for n in every),
      noise=old.noise if old else 0.0,
    )
  return curves
