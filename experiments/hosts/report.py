"""What was measured on hosts, as rows, a table and a plot."""

import os
import pathlib
from collections.abc import Sequence

import jax
import rich.table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common import records
from experiments.common.records import Row
from experiments.hosts.measure import Result

_COLUMNS = {
  "step_ms": "step, ms",
  "speedup": "over fp32",
  "ideal_ratio": "T / T*",
  "wire_ratio": "fewer bytes",
  "interface_bytes": "MB counted",
  "wire_bytes_counted": "without headers",
  "wire_bytes_predicted": "predicted",
}
_ALONE = ("none", "torch_none")


def ideal_ms(
  result: Result, none: Result, fp32: Result, rtt_ms: float
) -> float:
  """The time of a step that the link allows, in milliseconds.

  T* = N + D + (F - N - D) / r: the step without exchange, the round trip that
  any exchange waits for, and the rest of the fp32 exchange, shortened by the
  ratio of the bytes that the interfaces counted.

  Args:
    result: of the case.
    none: of the step without exchange.
    fp32: of the uncompressed exchange.
    rtt_ms: D.
  """
  ratio = fp32.interface_bytes / max(result.interface_bytes, 1.0)
  rest = max(fp32.step_ms - none.step_ms - rtt_ms, 0.0)
  return none.step_ms + rtt_ms + rest / ratio


def make_rows(
  results: Sequence[Result], experiment: str, rtt_ms: float
) -> list[Row]:
  """Makes the rows of what was measured, in the order of the cases.

  Args:
    results: one a case; speedups need `fp32`, ideal ratios `none` too.
    experiment: name in the rows.
    rtt_ms: round trip that was added to the link.
  """
  by_case = {result.case: result for result in results}
  none, fp32 = by_case.get("none"), by_case.get("fp32")
  stamp = records.machine(), jax.__version__
  rows = []
  for result in results:
    noise = {"step_ms": result.noise_ms}
    for metric, value in _metrics(result, none, fp32, rtt_ms).items():
      base = fp32.step_ms if fp32 and metric == "step_ms" else None
      rows.append(
        Row(
          experiment=experiment,
          case=result.case,
          metric=metric,
          value=value,
          unit=_unit(metric),
          baseline=base,
          ratio=value / base if base else None,
          noise=noise.get(metric),
          machine=stamp[0],
          jax=stamp[1],
        )
      )
  return rows


def _metrics(
  result: Result, none: Result | None, fp32: Result | None, rtt_ms: float
) -> dict[str, float]:
  found = {
    "step_ms": result.step_ms,
    "interface_bytes": result.interface_bytes,
    "wire_bytes_counted": result.wire_bytes,
  }
  if result.predicted_bytes is not None:
    found["wire_bytes_predicted"] = result.predicted_bytes
  if fp32 and result.case not in _ALONE:
    found["speedup"] = fp32.step_ms / result.step_ms
    found["wire_ratio"] = fp32.interface_bytes / result.interface_bytes
    if none:
      ideal = ideal_ms(result, none, fp32, rtt_ms)
      found["ideal_ratio"] = result.step_ms / ideal
  return found


def _unit(metric: str) -> str:
  if metric.endswith("_ms"):
    return "ms"
  return "bytes" if "bytes" in metric else "x"


def make_table(rows: Sequence[Row]) -> rich.table.Table:
  """Lays rows out, a case a line; bytes in millions, each step and host."""
  cells: dict[str, dict[str, float]] = {}
  for row in rows:
    cells.setdefault(row.case, {})[row.metric] = float(row.value)
  table = rich.table.Table(
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="MB a step and host. T* is what the link allows: the step without"
    " exchange, and the fp32 exchange shortened by the ratio of bytes.",
  )
  table.add_column("case")
  for title in _COLUMNS.values():
    table.add_column(title, justify="right")
  table.add_column("")
  for case, found in cells.items():
    line = [
      "" if (value := found.get(metric)) is None else _show(metric, value)
      for metric in _COLUMNS
    ]
    slower = found.get("speedup", 1.0) < 1.0
    table.add_row(case, *line, "slower than fp32: do not" if slower else "")
  return table


def _show(metric: str, value: float) -> str:
  if metric == "step_ms":
    return f"{value:.1f}"
  return f"{value / 1e6:.3f}" if "bytes" in metric else f"{value:.2f}"


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws the time of a step of every case, and what the link allows.

  Args:
    rows: made by `make_rows`.
    path: of the image; its suffix chooses the format.
  """
  values = {(row.case, row.metric): float(row.value) for row in rows}
  cases = list(dict.fromkeys(row.case for row in rows))[::-1]
  figure = Figure(figsize=(7, 0.35 * len(cases) + 1.5), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  for i, case in enumerate(cases):
    step_ms = values[case, "step_ms"]
    color = "tab:gray" if case.startswith("torch") else "tab:blue"
    axes.barh(i, step_ms, color=color)
    axes.annotate(
      f" {step_ms:.0f}", (step_ms, i), va="center", fontsize="small"
    )
    if (case, "ideal_ratio") in values:
      ideal = step_ms / values[case, "ideal_ratio"]
      axes.plot([ideal, ideal], [i - 0.4, i + 0.4], color="black")
  axes.set_yticks(range(len(cases)), cases)
  axes.set_xscale("log")
  axes.margins(x=0.1)
  axes.set_xlabel("ms a step; the black line is what the link allows")
  axes.set_title(rows[0].experiment)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
