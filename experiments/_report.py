"""From finished runs to rows, and from rows to a table and a plot."""

import os
import pathlib
import statistics
from collections.abc import Iterable, Iterator

import jax
import rich.table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from experiments import _rows
from experiments._checkpoint import Run
from experiments._rows import Row
from experiments._tasks import Task

_BASELINE = "fp32"
_LINKS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}  # bits per second
_COMPUTED = "ms (computed from bytes)"


def summarise(config: ConfigDict, task: Task, runs: Iterable[Run]) -> list[Row]:
  """One row for each exchange and metric, over the seeds.

  Args:
    config: of the job.
    task: names the score and brings facts about the data.
    runs: of the job.

  Returns:
    For each exchange the mean score, the bytes a worker sends per step, their
    ratio to fp32, the median step time, and the time those bytes would take on
    links of three speeds; then the facts.
  """
  by_exchange: dict[str, list[Run]] = {}
  for run in runs:
    by_exchange.setdefault(run.exchange, []).append(run)
  base = dict(_measure(task, by_exchange.get(_BASELINE, [])))
  machine = _rows.machine()

  def row(case: str, metric: str, value, unit: str, noise=None) -> Row:
    baseline = base.get(metric, (None,))[0] if case in by_exchange else None
    ratio = value / baseline if baseline else None
    return Row(
      config.experiment,
      case,
      metric,
      value,
      unit,
      baseline,
      ratio,
      noise,
      machine,
      jax.__version__,
    )

  rows = []
  for exchange, group in by_exchange.items():
    for metric, measured in _measure(task, group):
      rows.append(row(exchange, metric, *measured))
    if base:
      bytes_ = base["wire_bytes_predicted"][0]
      rows.append(
        row(exchange, "wire_ratio", bytes_ / group[0].wire_bytes, "x")
      )
  return rows + [row("data", *fact) for fact in task.facts]


def _measure(
  task: Task, runs: list[Run]
) -> Iterator[tuple[str, tuple[float, str, float | None]]]:
  """Yields ``(metric, (value, unit, noise))`` of one exchange."""
  if not runs:
    return
  scores = [run.score for run in runs]
  times = [run.step_ms for run in runs]
  yield task.metric, (statistics.fmean(scores), task.unit, _spread(scores))
  yield "wire_bytes_predicted", (runs[0].wire_bytes, "bytes", None)
  yield "step_ms", (statistics.median(times), "ms", _spread(times))
  for link, bits_per_second in _LINKS.items():
    ms = 8e3 * runs[0].wire_bytes / bits_per_second
    yield f"exchange_ms_{link}", (ms, _COMPUTED, None)


def _spread(values: list[float]) -> float | None:
  return statistics.stdev(values) if len(values) > 1 else None


def make_table(rows: list[Row], metric: str) -> rich.table.Table:
  """The rows as a table, a line for each exchange.

  Args:
    rows: made by ``summarise``.
    metric: the score to show.
  """
  cells = {(row.case, row.metric): row for row in rows}
  scores = [row for row in rows if row.metric == metric]
  table = rich.table.Table(
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="Last three columns: computed from the bytes, not measured.",
  )
  unit = "points" if scores[0].unit == "%" else scores[0].unit
  table.add_column("exchange")
  for name in (
    f"{metric} ({scores[0].unit})",
    f"to fp32 ({unit})",
    "bytes/step",
    "ratio",
    "step ms",
    "100 Mbit/s",
    "1 Gbit/s",
    "10 Gbit/s",
  ):
    table.add_column(name, justify="right")
  for score in scores:
    times = [cells[score.case, f"exchange_ms_{link}"].value for link in _LINKS]
    table.add_row(
      score.case,
      _with_noise(score),
      "-" if score.baseline is None else f"{score.value - score.baseline:+.2f}",
      f"{cells[score.case, 'wire_bytes_predicted'].value:,.0f}",
      _ratio(cells.get((score.case, "wire_ratio"))),
      f"{cells[score.case, 'step_ms'].value:.1f}",
      *(f"{ms:.3g} ms" for ms in times),
    )
  return table


def _with_noise(row: Row) -> str:
  noise = "" if row.noise is None else f" ± {row.noise:.2f}"
  return f"{row.value:.2f}{noise}"


def _ratio(row: Row | None) -> str:
  return "-" if row is None else f"{row.value:.2f}"


def save_plot(
  rows: list[Row], metric: str, path: str | os.PathLike[str]
) -> None:
  """Draws the score against the bytes a worker sends per step.

  Args:
    rows: made by ``summarise``.
    metric: the score to show.
    path: of the image; its suffix chooses the format.
  """
  sent = {r.case: r.value for r in rows if r.metric == "wire_bytes_predicted"}
  scores = [row for row in rows if row.metric == metric]
  figure = Figure(figsize=(7, 4.5), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  for row in scores:
    x = sent[row.case]
    axes.errorbar(x, row.value, row.noise, fmt="o", capsize=3)
    axes.annotate(
      row.case,
      (x, row.value),
      xytext=(0, 10),
      textcoords="offset points",
      ha="center",
    )
  axes.set_xscale("log")
  axes.margins(0.15)
  axes.set_xlabel("bytes one worker sends per step")
  axes.set_ylabel(f"{metric} ({scores[0].unit})")
  axes.set_title(f"{rows[0].experiment}: mean and spread over the seeds")
  axes.grid(alpha=0.3)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
