"""Tables of policies: their figures, and whether a stock one beats ours."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.common import records, tables
from experiments.residuals import policies

_MIB = 2**20
EQUAL_SHARE = 1e-3
"""FLOPs and bytes that differ by this share are equal."""

Points = dict[str, dict[str, float]]
"""Figures by policy and metric."""


class Loss(NamedTuple):
  """A stock policy that saves fewer bytes than ours at its FLOPs.

  Attributes:
    policy: name of the stock policy.
    nbytes: bytes that it holds.
    ours: fewest bytes of ours at equal or fewer FLOPs; None if all take more.
  """

  policy: str
  nbytes: float
  ours: float | None


def group_points(rows: Sequence[records.Row]) -> dict[str, Points]:
  """Returns the figures by model, policy and metric."""
  found: dict[str, Points] = {}
  for row in rows:
    model, _, policy = row.case.rpartition("/")
    points = found.setdefault(model, {})
    if not isinstance(row.value, str):
      points.setdefault(policy, {})[row.metric] = row.value
  return found


def find_losses(points: Points, cost: str = "flops") -> Iterator[Loss]:
  """Yields stock policies that ours does not match, without rounding."""
  for policy, stock in points.items():
    if not policy.startswith("jax_"):
      continue
    ours = least_bytes(points, stock[cost], cost)
    if ours is None or ours > (1 + EQUAL_SHARE) * stock["temp_bytes"]:
      yield Loss(policy, stock["temp_bytes"], ours)


def least_bytes(
  points: Points, most: float, cost: str = "flops"
) -> float | None:
  """Returns the fewest bytes of ours at this cost or less, exact."""
  return min(
    (
      found["temp_bytes"]
      for policy, found in points.items()
      if policies.is_ours(policy)
      and policies.is_exact(policy)
      and found[cost] <= most * (1 + EQUAL_SHARE)
    ),
    default=None,
  )


def figures_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns a line of figures for every model and policy."""
  header = ("model", "policy", "MiB", "TFLOP", "step, ms", "trace", "compile")
  lines = []
  for model, points in group_points(rows).items():
    plain = points.get("plain", {})
    for policy, found in points.items():
      lines.append(
        (
          model,
          policy,
          f"{found['temp_bytes'] / _MIB:,.0f}",
          f"{found['flops'] / 1e12:.3f}",
          f"{found['step_ms_predicted']:.1f}",
          *(
            f"{found[metric] / plain[metric]:.1f}x" if plain else ""
            for metric in ("trace_s", "compile_s")
          ),
        )
      )
  return tables.Table(
    header,
    lines,
    title="Compiled, not run; predicted from datasheets",
    caption="trace, compile: processor time, relative to plain.",
    text_columns=(0, 1),
  )


def losses_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns a line for each stock policy that holds less than ours."""
  lines = []
  for model, points in group_points(rows).items():
    for loss in find_losses(points):
      ours = "all take more FLOPs"
      if loss.ours is not None:
        ours = f"{loss.ours / _MIB:,.0f}"
      flops = f"{points[loss.policy]['flops'] / 1e12:.2f}"
      held = f"{loss.nbytes / _MIB:,.0f}"
      lines.append((model, loss.policy, flops, held, ours))
  return tables.Table(
    ("model", "policy", "TFLOP", "MiB", "ours at these FLOPs, MiB"),
    lines,
    title="Stock policies that hold less than ours at their FLOPs",
    text_columns=(0, 1),
  )


def verdict_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns a line for every model: does a stock policy hold less anywhere?"""
  header = (
    "model",
    "plain, MiB",
    "lossless saves",
    "below ours by FLOPs",
    "by time",
    "at `no_batch`",
    "8 bits, MiB",
    "4 bits, MiB",
    "budget 0",
    "trace",
    "compile",
  )
  lines = [
    _list_verdicts(model, points)
    for model, points in group_points(rows).items()
  ]
  return tables.Table(
    header,
    lines,
    title="Ours beside stock policies",
    caption="below ours: stock policies that hold less, of all policies, at"
    " equal or fewer FLOPs, or predicted time; 0.1 % more is equal. at"
    " no_batch: our bytes at the FLOPs of no-batch dots, beside its own. budget"
    " 0: bytes and FLOPs beside those of jax.checkpoint. trace, compile:"
    " highest ratio of ours to plain.",
  )


def _list_verdicts(model: str, points: Points) -> tuple[str, ...]:
  plain = points.get("plain", {})
  ours = [found for policy, found in points.items() if policies.is_ours(policy)]
  saved = _ratio(points, "ours", "plain", "temp_bytes")
  stock = [policy for policy in points if policy.startswith("jax_")]

  def highest(metric: str) -> str:
    if not plain or not ours:
      return "-"
    return f"{max(found[metric] for found in ours) / plain[metric]:.1f}x"

  return (
    model,
    _format_mib(points, "plain"),
    "-" if saved is None else f"{100 * (1 - saved):.1f} %",
    *(
      f"{len(list(find_losses(points, cost)))} of {len(stock)}"
      for cost in ("flops", "step_ms_predicted")
    ),
    _compare_no_batch(points),
    _format_mib(points, "ours_8bits"),
    _format_mib(points, "ours_4bits"),
    _compare_least(points),
    highest("trace_s"),
    highest("compile_s"),
  )


def _compare_no_batch(points: Points) -> str:
  """Returns the bytes of ours at the FLOPs of no-batch dots, in percent."""
  stock = [f for p, f in points.items() if p.endswith("_no_batch")]
  if not stock:
    return "-"
  best = min(stock, key=lambda found: found["temp_bytes"])
  ours = least_bytes(points, best["flops"])
  if ours is None:
    return "more FLOPs"
  return f"{100 * (ours / best['temp_bytes'] - 1):+.1f} %"


def _compare_least(points: Points) -> str:
  found = [p for p in points if p.endswith("_nothing")]
  if not found or "ours_budget_0" not in points:
    return "-"
  ratios = [
    _ratio(points, "ours_budget_0", found[0], metric)
    for metric in ("temp_bytes", "flops")
  ]
  return ", ".join(f"{100 * (ratio - 1):+.0f} %" for ratio in ratios if ratio)


def _ratio(points: Points, one: str, other: str, metric: str) -> float | None:
  if one not in points or other not in points or not points[other][metric]:
    return None
  return points[one][metric] / points[other][metric]


def _format_mib(points: Points, policy: str) -> str:
  if policy not in points:
    return "-"
  return f"{points[policy]['temp_bytes'] / _MIB:,.0f}"
