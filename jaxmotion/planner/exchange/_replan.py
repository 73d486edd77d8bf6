"""Public API: `replan`, which corrects a plan by measurements."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxmotion import codecs, core, perfmodel
from jaxmotion.collectives.extend import part_like
from jaxmotion.perfmodel.extend import decode_seconds, encode_seconds
from jaxmotion.planner.exchange import _plan, _problem, _solve, _table

# Of a part of a step, in at most eleven days.
_SECONDS = core.optional(core.measured(core.number(0, 1e6, open_low=True)))


@core.declare(
  plan=core.instance(_plan.ExchangePlan, "what `advise` returned"),
  compute_s=_SECONDS,
  coding_s=_SECONDS,
  link_s=_SECONDS,
  step_s=_SECONDS,
)
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
  given = dict(
    compute_s=compute_s, coding_s=coding_s, link_s=link_s, step_s=step_s
  )
  if not any(value is not None for value in given.values()):
    raise ValueError(f"`replan` must be given one of {list(given)}, got none.")
  if link_s is not None and step_s is not None:
    raise ValueError(
      f"`step_s` must be None where `link_s` is given, got {step_s!r}."
    )
  problem, step = plan.problem, plan.step
  if compute_s is not None:
    factor = compute_s / (step.compute_s + step.update_s + step.call_s)
    problem = _correct(problem, _scale_device, "compute_s", compute_s, factor)
  if coding_s is not None:
    table, choice = table_of_plan(plan, problem)
    predicted = float(table.coding_s[np.arange(len(choice)), choice].sum())
    factor = _measured_factor("coding_s", coding_s, predicted)
    problem = _correct(problem, _scale_codecs, "coding_s", coding_s, factor)
  table, choice = table_of_plan(plan, problem)
  if link_s is not None:
    predicted = sum_link_seconds(table, choice)
    factor = _measured_factor("link_s", link_s, predicted)
    problem = _correct(problem, _scale_links, "link_s", link_s, factor)
  if step_s is not None:
    factor = _solve_link_factor(table, choice, step_s)
    problem = _correct(problem, _scale_links, "step_s", step_s, factor)
  return _solve.solve_exchange(problem)


def _correct(
  problem: _problem.ExchangeProblem,
  scale: Callable[[_problem.ExchangeProblem, float], perfmodel.Platform],
  name: str,
  measured: float,
  factor: float,
) -> _problem.ExchangeProblem:
  """Returns the problem on a platform that explains a measurement."""
  try:
    return dataclasses.replace(problem, platform=scale(problem, factor))
  except ValueError as error:
    raise ValueError(
      f"`{name}` must be what a platform can take, got {measured!r}, with"
      f" which {error}"
    ) from error


def _measured_factor(name: str, measured: float, predicted: float) -> float:
  """Returns how many times as long as predicted a kind of work took."""
  if not predicted:
    raise ValueError(
      f"`{name}` must be None for a plan that has nothing of the kind, got "
      f"{measured!r}."
    )
  return measured / predicted


def table_of_plan(
  plan: _plan.ExchangePlan, problem: _problem.ExchangeProblem
) -> tuple[_table.StepTable, np.ndarray]:
  """Returns costs of a plan's codecs, and the row of each tensor's codec."""
  used = list(dict.fromkeys(choice.codec for choice in plan.choices))
  mixed = not all(codec.summable for codec in used)
  table = _table.make_table(
    _table.TensorCosts(problem), used, plan.method, mixed=mixed
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


def _scale_device(
  problem: _problem.ExchangeProblem, factor: float
) -> perfmodel.Platform:
  """Returns a platform whose device computes `factor` times as long."""
  platform = problem.platform
  device = platform.device
  rates = device.matmul_flops_per_s
  scaled = dataclasses.replace(
    device,
    matmul_flops_per_s={dtype: rate / factor for dtype, rate in rates.items()},
    vector_flops_per_s=device.vector_flops_per_s / factor,
    memory_rate=_divide_rate(device.memory_rate, factor),
    kernel_s=device.kernel_s * factor,
    call_s=device.call_s * factor,
    # Curves of codecs were measured: the step's factor says nothing of them.
    measured=_scale_curves(
      device.measured, factor, kept=("encode", "decode", "add")
    ),
  )
  return dataclasses.replace(platform, device=scaled)


def _divide_rate(rate: perfmodel.Rate, factor: float) -> perfmodel.Rate:
  """Returns the rate at which bytes take `factor` times as long."""
  return perfmodel.Rate(bytes_per_s=rate.bytes_per_s / factor)


def _scale_curves(
  curves: Mapping[str, perfmodel.Curve], factor: float, kept: Sequence[str] = ()
) -> dict[str, perfmodel.Curve]:
  """Returns curves of `factor` times the seconds, except of kinds to keep."""
  return {
    name: curve
    if name.split()[0] in kept
    else dataclasses.replace(
      curve, seconds=tuple(factor * s for s in curve.seconds)
    )
    for name, curve in curves.items()
  }


def _scale_links(
  problem: _problem.ExchangeProblem, factor: float
) -> perfmodel.Platform:
  """Returns a platform whose collectives take `factor` times as long."""
  axes = []
  for axis in problem.platform.axes:
    if axis.name in core.axis_names(problem.mesh_axis):
      link = dataclasses.replace(
        axis.link,
        latency_s=axis.link.latency_s * factor,
        rate=_divide_rate(axis.link.rate, factor),
        measured=_scale_curves(axis.link.measured, factor),
      )
      axis = dataclasses.replace(axis, link=link)
    axes.append(axis)
  return dataclasses.replace(problem.platform, axes=tuple(axes))


def _scale_codecs(
  problem: _problem.ExchangeProblem, factor: float
) -> perfmodel.Platform:
  """Returns a platform on which all candidates take `factor` times as long."""
  # Each codec gets curves of its own, which are exact at the sizes of the
  # problem's tensors and of their parts.
  platform = problem.platform
  leaves = jax.tree.leaves(problem.exchanged_tree())
  sizes = {leaf.size for leaf in leaves}
  curves = dict(platform.device.measured)
  for codec in problem.candidates:
    parts = {part_like(codec, leaf, problem.workers).size for leaf in leaves}
    curves |= _codec_curves(
      codec, (sizes | parts) - {0}, platform.device, factor
    )
  device = dataclasses.replace(platform.device, measured=curves)
  return dataclasses.replace(platform, device=device)


def _codec_curves(
  codec: codecs.Codec, sizes: set[int], device: perfmodel.Device, factor: float
) -> dict[str, perfmodel.Curve]:
  """Returns curves of encoding, decoding and adding one more payload."""
  # They are `factor` times what the device is predicted to take at each size.
  decode = functools.partial(decode_seconds, codec, device=device)
  predictions = {
    "encode": lambda n: encode_seconds(codec, n, device),
    "decode": lambda n: decode(n, 1),
    "add": lambda n: decode(n, 2) - decode(n, 1),
  }
  curves = {}
  for action, predict in predictions.items():
    name = f"{action} {codec!r}"
    old = device.measured.get(name)
    knots = sorted({*sizes, *(map(int, old.sizes) if old else ())})
    curves[name] = perfmodel.Curve(
      sizes=tuple(knots),
      # Curves must be positive.
      seconds=tuple(max(factor * predict(n), 1e-12) for n in knots),
      noise=old.noise if old else 0.0,
    )
  return curves
