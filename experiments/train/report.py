"""From finished runs to rows, and from rows to a table and a plot."""

import os
import pathlib
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import jax
import rich.table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments.common import records
from experiments.common.checkpoint import Run
from experiments.common.records import Row
from experiments.train.tasks import Task

_BASELINE = "fp32"
_LINKS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}  # bits per second
_COMPUTED = "ms (computed from bytes)"


class _Measured(NamedTuple):
  value: float
  unit: str
  noise: float | None = None


def summarise(config: ConfigDict, task: Task, runs: Iterable[Run]) -> list[Row]:
  """One row for each exchange and metric, over the seeds.

  Args:
    config: of the job.
    task: names the score and brings facts about the data.
    runs: of the job.

  Returns:
    For each exchange the mean score, the bytes a worker sends per step, the
    median step time, the time those bytes would take on links of three speeds,
    and fp32's bytes over these bytes; then the facts.
  """
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(run.exchange, []).append(run)
  # The workers of one process share its link.
  sharing = config.workers // count if (count := jax.process_count()) > 1 else 1
  cases = {
    name: _measure(task, group, sharing) for name, group in groups.items()
  }
  base = cases.get(_BASELINE, {})
  stamp = (records.machine(), jax.__version__)
  rows = []
  for name, measured in cases.items():
    for metric, (value, unit, noise) in _with_ratio(measured, base).items():
      baseline = base[metric].value if metric in base else None
      ratio = value / baseline if baseline else None
      named = (config.experiment, name, metric)
      rows.append(Row(*named, value, unit, baseline, ratio, noise, *stamp))
  for metric, fact, unit in task.facts:
    named = (config.experiment, "data", metric)
    rows.append(Row(*named, fact, unit, None, None, None, *stamp))
  return rows


def _measure(task: Task, runs: list[Run], sharing: int) -> dict[str, _Measured]:
  """The measurements of one exchange by metric."""
  scores = [run.score for run in runs]
  times = [run.step_ms for run in runs]
  sent = runs[0].wire_bytes
  return {
    task.metric: _Measured(
      statistics.fmean(scores), task.unit, _spread(scores)
    ),
    "loss": _Measured(statistics.fmean(run.loss for run in runs), "nats"),
    "wire_bytes_predicted": _Measured(sent, "bytes/step/worker"),
    "wire_bytes_compiled": _Measured(
      runs[0].compiled_bytes, "bytes/step/worker"
    ),
    "compile_s": _Measured(runs[0].compile_s, "s"),
    "step_ms": _Measured(statistics.median(times), "ms", _spread(times)),
    **{
      f"exchange_ms_{link}": _Measured(8e3 * sharing * sent / speed, _COMPUTED)
      for link, speed in _LINKS.items()
    },
  }


def _with_ratio(
  measured: dict[str, _Measured], base: dict[str, _Measured]
) -> dict[str, _Measured]:
  if not base:
    return measured
  sent = "wire_bytes_predicted"
  ratio = _Measured(base[sent].value / measured[sent].value, "x")
  return measured | {"wire_ratio": ratio}


def _spread(values: list[float]) -> float | None:
  return statistics.stdev(values) if len(values) > 1 else None


def make_table(rows: list[Row], metric: str) -> rich.table.Table:
  """The rows as a table, a line for each exchange.

  Args:
    rows: made by `summarise`.
    metric: the score to show.
  """
  values = {(row.case, row.metric): row.value for row in rows}
  scores = [row for row in rows if row.metric == metric]
  table = rich.table.Table(
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="± is the standard deviation over the seeds. The last three"
    " columns are computed from the bytes, not measured.",
  )
  points = "points" if scores[0].unit == "%" else scores[0].unit
  table.add_column("exchange")
  for header in (
    f"{metric}, {scores[0].unit}",
    f"to fp32, {points}",
    "bytes/step",
    "ratio",
    "step ms",
    "100 Mbit/s",
    "1 Gbit/s",
    "10 Gbit/s",
  ):
    table.add_column(header, justify="right")
  for row in scores:
    table.add_row(row.case, *_score_cells(row), *_cost_cells(row.case, values))
  return table


def _score_cells(row: Row) -> tuple[str, str]:
  digits = 2 if row.unit == "%" else 3
  value = float(row.value)
  noise = "" if row.noise is None else f" ± {row.noise:.{digits}f}"
  gap = "-" if row.baseline is None else f"{value - row.baseline:+.{digits}f}"
  return f"{value:.{digits}f}{noise}", gap


def _cost_cells(
  case: str, values: dict[tuple[str, str], float | str]
) -> list[str]:
  ratio = values.get((case, "wire_ratio"))
  return [
    f"{values[case, 'wire_bytes_predicted']:,.0f}",
    "-" if ratio is None else f"{ratio:.2f}",
    f"{values[case, 'step_ms']:.1f}",
    *(f"{values[case, f'exchange_ms_{link}']:.3g} ms" for link in _LINKS),
  ]


def save_plot(
  rows: list[Row], metric: str, path: str | os.PathLike[str]
) -> None:
  """Draws the score against the bytes a worker sends per step.

  Args:
    rows: made by `summarise`.
    metric: the score to show.
    path: of the image; its suffix chooses the format.
  """
  sent = {
    row.case: float(row.value)
    for row in rows
    if row.metric == "wire_bytes_predicted"
  }
  scores = [row for row in rows if row.metric == metric]
  figure = Figure(figsize=(7, 4.5), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  for i, row in enumerate(sorted(scores, key=lambda row: sent[row.case])):
    x, y = sent[row.case], float(row.value)
    (marker, *_) = axes.errorbar(x, y, row.noise, fmt="o", capsize=3)
    axes.annotate(
      row.case,
      (x, y + (row.noise or 0.0)),
      xytext=(0, 6 + 12 * (i % 2)),  # Two heights: neighbours do not touch.
      textcoords="offset points",
      color=marker.get_color(),
      ha="center",
    )
  axes.set_xscale("log")
  axes.margins(0.2)
  axes.set_xlabel("bytes one worker sends per step")
  axes.set_ylabel(f"{metric} ({scores[0].unit})")
  axes.set_title(f"{rows[0].experiment}: mean and spread over the seeds")
  axes.grid(alpha=0.3)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
