"""Tables of all residual rows, and whether a stock policy beats ours."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.common import records, tables
from experiments.residuals import policies

_MIB = 2**20
_SIZES = "batch", "layers", "length"
EQUAL_SHARE = 1e-3
"""FLOPs and bytes that differ by this share are equal."""

Points = dict[str, dict[str, float]]
"""Figures by policy and metric."""


class Loss(NamedTuple):
  """A stock policy that saves fewer bytes than ours at its FLOPs."""

  policy: str  # Name of the stock policy.
  nbytes: float  # Bytes that it holds.
  # Fewest bytes of ours at equal or fewer FLOPs; None if all take more.
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
      figures = (
        f"{found['temp_bytes'] / _MIB:,.0f}",
        f"{found['flops'] / 1e12:.3f}",
        f"{found['step_ms_predicted']:.1f}",
      )
      seconds = (
        f"{found[metric] / plain[metric]:.1f}x" if plain else ""
        for metric in ("trace_s", "compile_s")
      )
      lines.append((model, policy, *figures, *seconds))
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
    *("model", "plain, MiB", "lossless saves", "below ours by FLOPs"),
    *("by time", "at `no_batch`", "8 bits, MiB", "4 bits, MiB"),
    *("budget 0", "trace", "compile"),
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
  """Returns a model's line of `verdict_table`."""
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
  """Compares budget 0 with `jax.checkpoint` in bytes and FLOPs, in percent."""
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


_MODES = {
  "jax_checkpoint": "`jax.checkpoint`",
  "cut": "lossless",
  "cut_together": "lossless, together",
  "cut_int4": "4 bits",
  "cut_int4_together": "4 bits, together",
  "update_int4_host": "4 bits on the host",
  "everything": "everything",
}


_COMPARED = (
  *("saved_percent", "step_percent", "step_percent_predicted", "deepest"),
  *("largest_batch", "budget_bytes", "device_bytes_predicted", "least_bytes"),
)


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the table that the docs show of the rows of one command."""
  metrics = {row.metric for row in rows}
  if rows[0].experiment == "residuals_compare":
    return verdict_table(rows)
  if "test_accuracy" in metrics:
    return accuracy_table(rows)
  if rows[0].experiment == RESIDENT:
    return resident_table(rows)
  if rows[0].experiment == STEPS:
    return steps_table(rows)
  if "values_equal" in metrics:
    return equality_table(rows)
  return memory_table(rows)


def memory_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the share of temporary memory that each mode saves."""
  temp = {row.case: row for row in rows if row.metric == "temp_bytes"}
  lines = []
  for case in [c for c in temp if c.endswith("/plain") and c.count("/") == 1]:
    network = case.removesuffix("/plain")
    line = [
      network.replace("_batch", ", "),
      f"{float(temp[case].value) / _MIB:.0f}",
    ]
    for mode in _MODES:
      row = temp.get(f"{network}/{mode}")
      ratio = None if row is None else row.ratio
      line.append("" if ratio is None else f"{100 * (1 - ratio):.1f} %")
    lines.append(line)
  return tables.Table(("network, batch", "plain, MiB", *_MODES.values()), lines)


def accuracy_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns test accuracy and gradient error with compressed residuals."""
  errors = {
    (row.experiment, row.case): float(row.value)
    for row in rows
    if row.metric == "gradient_error"
  }
  lines = [
    (
      row.experiment.rpartition("_")[2],
      row.case,
      tables.format_noise(row),
      tables.format_gap(row),
      f"{errors[row.experiment, row.case]:.2g}",
    )
    for row in rows
    if row.metric == "test_accuracy"
  ]
  header = (
    *("network", "residuals", "test accuracy, %", "to fp32, points"),
    "error of the first gradient",
  )
  return tables.Table(
    header,
    lines,
    title="Training with compressed residuals",
    caption="± is the standard deviation over the seeds.",
    text_columns=(0, 1),
  )


def equality_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the errors of the first gradient, a line for each mode."""
  found = tables.index_rows(rows)

  def format_cell(case: str, metric: str, style: str) -> str:
    row = found.get((case, metric))
    return "" if row is None else format(float(row.value), style)

  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    ratio = found[case, "gradient_error"].ratio
    line = (
      case,
      format_cell(case, "gradient_error", ".2e"),
      "" if ratio is None else f"{ratio:.2f}",
      format_cell(case, "gradient_from_plain", ".2e"),
      format_cell(case, "values_equal", ".1%"),
      format_cell(case, "gradient_error_float64", ".2e"),
    )
    lines.append(line)
  header = (
    *("network, mode", "error to float64", "over plain's"),
    *("distance to plain", "equal elements", "error, both in float64"),
  )
  return tables.Table(header, lines, title="Gradients of the first step")


def point_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the figures of each network, batch and mode."""
  found = tables.index_rows(rows)
  cases = [case for case, metric in found if metric == "temp_bytes"]
  machines = {
    records.drop_sources(row.machine)
    for row in rows
    if row.metric == "temp_bytes"
  }
  header = (
    *("network, batch, mode", "temp", "of plain", "host", "args", "results"),
    *("FLOPs", "step", "measured", "compile, s"),
  )
  return tables.Table(
    header,
    [_point_cells(found, case) for case in cases],
    title="; ".join(sorted(machines)),
    caption="GiB of temporaries on the device and in host memory, of arguments"
    " and of results. FLOPs, step: predicted, relative to plain. measured: time"
    " of a step on a GPU.",
  )


def _point_cells(
  found: dict[tuple[str, str], records.Row], case: str
) -> list[str]:
  """Returns a case's line of `point_table`."""
  temp = found[case, "temp_bytes"]
  if isinstance(temp.value, str):
    return [case, temp.value, *[""] * 8]
  step = found[case, "step_ms"].value
  gib = [
    f"{float(found[case, f'{part}_bytes'].value) / 2**30:.2f}"
    for part in ("temp", "host_temp", "argument", "result")
  ]
  return [
    case,
    gib[0],
    _format_ratio(temp),
    *gib[1:],
    _format_ratio(found[case, "flops"]),
    _format_ratio(found[case, "step_ms_predicted"]),
    "not measured" if isinstance(step, str) else f"{step:.1f} ms",
    f"{found[case, 'compile_s'].value:.0f}",
  ]


def _format_ratio(row: records.Row) -> str:
  return "-" if row.ratio is None else f"{row.ratio:.3f}"


def comparison_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns savings, fitting sizes and budgets beside the published figures."""
  lines = [
    (
      row.case,
      row.metric,
      row.value if isinstance(row.value, str) else f"{row.value:.4g}",
      row.unit,
      row.machine,
    )
    for row in rows
    if row.metric in _COMPARED
  ]
  return tables.Table(
    ("case", "metric", "value", "unit", "source"),
    lines,
    title="Beside the published figures",
    text_columns=(0, 1, 3, 4),
  )


STEPS = "residuals_steps"
"""Name of the experiment of steps that run on a device."""

RUN = {
  "plain": "plain",
  "jax_block_nothing": "`jax.checkpoint`",
  "jax_block_no_batch": "`no_batch`",
  "ours": "lossless",
  "ours_budget_0": "budget 0",
  "ours_8bits": "8 bits",
  "ours_4bits": "4 bits",
}
"""Policies whose steps are run, and their heads in the table."""


def steps_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns step times, predictions and temporaries, by model and policy."""
  found = tables.index_rows(rows)
  cases = [case for case, metric in found if metric == "step_ms_predicted"]
  models = dict.fromkeys(case.rpartition("/")[0] for case in cases)
  parts = {
    "ms": ("step_ms", 1.0),
    "predicted, ms": ("step_ms_predicted", 1.0),
    "GB": ("temp_bytes", 1e9),
  }
  lines = []
  for model in models:
    for label, (metric, unit) in parts.items():
      rows_of = [found.get((f"{model}/{policy}", metric)) for policy in RUN]
      cells = [
        "-"
        if row is None or isinstance(row.value, str)
        else f"{row.value / unit:.4g}"
        for row in rows_of
      ]
      lines.append((f"{model}: {label}", *cells))
  return tables.Table(("model", *RUN.values()), lines)


RESIDENT = "residuals_resident"
"""Name of the experiment of models that train in a fixed memory."""

LOSS_AFTER = "loss"
"""Name of the case of held-out loss, beside those of sizes that grow."""


def resident_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the largest sizes that ran, their memory, and the loss."""
  found = tables.index_rows(rows)

  def show(case: str, metric: str, form: str, unit: float = 1) -> str:
    row = found.get((case, metric))
    return "" if row is None else format(float(row.value) / unit, form)

  lines = [
    (
      mode,
      *(show(f"{mode}/{size}", "size", ".0f") for size in _SIZES),
      show(f"{mode}/batch", "used", ".2f", 1e9),
      show(f"{mode}/batch", "compiled", ".2f", 1e9),
      show(f"{mode}/batch", "step_s", ".1f"),
      show(f"{mode}/{LOSS_AFTER}", "loss_after", ".3f"),
    )
    for mode in dict.fromkeys(row.case.split("/")[0] for row in rows)
  ]
  of_batch = "used, GB", "compiled, GB", "step, s"
  return tables.Table(("mode", *_SIZES, *of_batch, "loss after"), lines)
