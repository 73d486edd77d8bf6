"""Tables of residual memory, of fits and budgets, of accuracy and equality."""

from collections.abc import Sequence

from experiments.common import kept, records, tables
from experiments.residuals import verdicts

_GIB = 2**30

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
  "saved_percent",
  "step_percent",
  "step_percent_predicted",
  "deepest",
  "largest_batch",
  "budget_bytes",
  "device_bytes_predicted",
  "least_bytes",
)


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the table that the docs show of the rows of one command."""
  metrics = {row.metric for row in rows}
  if rows[0].experiment == "residuals_compare":
    return verdicts.verdict_table(rows)
  if "test_accuracy" in metrics:
    return accuracy_table(rows)
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
      f"{float(temp[case].value) / 2**20:.0f}",
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
    "network",
    "residuals",
    "test accuracy, %",
    "to fp32, points",
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
    lines.append(
      (
        case,
        format_cell(case, "gradient_error", ".2e"),
        "" if ratio is None else f"{ratio:.2f}",
        format_cell(case, "gradient_from_plain", ".2e"),
        format_cell(case, "values_equal", ".1%"),
        format_cell(case, "gradient_error_float64", ".2e"),
      )
    )
  header = (
    "network, mode",
    "error to float64",
    "over plain's",
    "distance to plain",
    "equal elements",
    "error, both in float64",
  )
  return tables.Table(header, lines, title="Gradients of the first step")


def point_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the figures of each network, batch and mode."""
  found = tables.index_rows(rows)
  cases = [case for case, metric in found if metric == "temp_bytes"]
  machines = {
    kept.drop_sources(row.machine) for row in rows if row.metric == "temp_bytes"
  }
  header = (
    "network, batch, mode",
    "temp",
    "of plain",
    "host",
    "args",
    "results",
    "FLOPs",
    "step",
    "measured",
    "compile, s",
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
  temp = found[case, "temp_bytes"]
  if isinstance(temp.value, str):
    return [case, temp.value, *[""] * 8]
  step = found[case, "step_ms"].value
  return [
    case,
    _format_gib(temp),
    _format_ratio(temp),
    *(
      _format_gib(found[case, metric])
      for metric in ("host_temp_bytes", "argument_bytes", "result_bytes")
    ),
    _format_ratio(found[case, "flops"]),
    _format_ratio(found[case, "step_ms_predicted"]),
    "not measured" if isinstance(step, str) else f"{step:.1f} ms",
    f"{found[case, 'compile_s'].value:.0f}",
  ]


def _format_gib(row: records.Row) -> str:
  return f"{float(row.value) / _GIB:.2f}"


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
