"""From rows to tables and a plot."""

import os
import pathlib
from collections.abc import Sequence

import rich.table
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common.records import Row
from experiments.common.tables import Table
from experiments.hetero.cases import CASES, DEALS, WORKERS

HEADERS = (
  "slowed, data",
  "case",
  "shares at the end",
  "step ms",
  "to equal",
  "T/T*",
  "of medians",
  "training s",
  "test accuracy, %",
  "train loss",
  "over equal",
)
Cells = dict[tuple[str, str, str], Row]

_CAPTION = (
  "± over seeds. Times are emulated: each worker was timed alone, in its turn,"
  " on this machine's cores; a step is the slowest worker's time and the"
  " exchange of all. T* is the work split by speed, exactly; T the median of"
  " the slowest worker's times, or the slowest worker's median."
)


def cells(rows: Sequence[Row]) -> Cells:
  """Rows by experiment, case and metric."""
  return {(r.experiment, r.case, r.metric): r for r in rows}


def training_table(rows: Sequence[Row]) -> rich.table.Table:
  """Time and accuracy, a line for each scenario, deal and case.

  Args:
    rows: of `_findings.make_rows`.
  """
  table = rich.table.Table(
    title=f"Unequal workers on {rows[0].machine}, JAX {rows[0].jax}",
    caption=_CAPTION,
  )
  for i, header in enumerate(HEADERS):
    names = i < 2
    table.add_column(
      header, justify="left" if names else "right", no_wrap=names
    )
  found = cells(rows)
  for name in experiments_of(rows):
    for case in CASES:
      table.add_row(*line(found, name, case))
    table.add_section()
  return table


def line(found: Cells, name: str, case: str) -> list[str]:
  """What a table says of a case, beginning with the names.

  Args:
    found: of `cells`.
    name: of the experiment.
    case: of the experiment.
  """

  def show(metric: str, digits: int) -> str:
    row = found[name, case, metric]
    noise = "" if row.noise is None else f" ± {row.noise:.{digits}f}"
    return f"{row.value:.{digits}f}{noise}"

  shares = [
    f"{found[name, case, f'microbatches_{i}'].value:.3g}"
    for i in range(WORKERS)
  ]
  return [
    name.removeprefix("hetero_"),
    case,
    " ".join(shares),
    show("step_ms", 1),
    f"{found[name, case, 'step_ms'].ratio:.2f}",
    show("ideal_ratio", 2),
    show("balance_ratio", 2),
    f"{found[name, case, 'train_s'].value:.2f}",
    show("test_accuracy", 2),
    f"{found[name, case, 'train_loss'].value:.3f}",
    show("loss_gap", 3),
  ]


def experiments_of(rows: Sequence[Row]) -> list[str]:
  """Names of the experiments that trained, in order."""
  names = [r.experiment for r in rows if r.metric == "step_ms"]
  return list(dict.fromkeys(names))


def gradient_table(rows: Sequence[Row]) -> rich.table.Table:
  """Bias and variance of the two means.

  Args:
    rows: of `_findings.make_rows`.
  """
  table = rich.table.Table(
    title="The mean of the workers' gradients, at the initial parameters",
    caption="Bias relative to the gradient of all images; in brackets what an"
    " unbiased estimate would show over as many draws.",
  )
  for header in (
    "data",
    "mean",
    "bias",
    "variance",
    "to weighted",
    "predicted",
  ):
    table.add_column(header)
  found = cells(rows)
  for name, case, metric in found:
    if metric == "gradient_bias":
      bias = found[name, case, metric]
      variance = found[name, case, "gradient_variance"]
      predicted = found.get((name, case, "predicted_variance_ratio"))
      table.add_row(
        name.removeprefix("hetero_gradient_"),
        case,
        f"{bias.value:.3f} ({bias.noise:.3f})",
        f"{variance.value:.3f}",
        f"{variance.ratio:.2f}",
        "" if predicted is None else f"{predicted.value:.2f}",
      )
  return table


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws step time over its ideal, and the loss over that of equal shares.

  Args:
    rows: of `_findings.make_rows`.
    path: of the image; its suffix chooses the format.
  """
  figure = Figure(figsize=(10, 4.5), layout="constrained")
  FigureCanvasAgg(figure)
  left, right = figure.subplots(1, 2)
  _bars(left, rows, "ideal_ratio", "work of a step / ideal split (emulated)")
  left.axhline(1.0, color="black", linewidth=1)
  left.axhline(1.1, color="black", linewidth=1, linestyle=":")
  left.legend(fontsize=8)
  _bars(right, rows, "loss_gap", "training loss over that of equal, nats")
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)


def _bars(axes: Axes, rows: Sequence[Row], metric: str, label: str) -> None:
  found, names = cells(rows), experiments_of(rows)
  width = 0.8 / len(CASES)
  for i, case in enumerate(CASES):
    shown = [found[name, case, metric] for name in names]
    axes.bar(
      [j + (i - (len(CASES) - 1) / 2) * width for j in range(len(names))],
      [float(row.value) for row in shown],
      width,
      yerr=[row.noise or 0.0 for row in shown],
      capsize=2,
      label=case,
    )
  short = [name.removeprefix("hetero_") for name in names]
  for deal in DEALS:
    short = [name.replace(f"_{deal}", f"\n{deal}") for name in short]
  axes.set_xticks(range(len(names)), short, fontsize=8)
  axes.set_ylabel(label)
  axes.grid(axis="y", alpha=0.3)


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns time and accuracy, a line for each scenario, deal and case.

  Args:
    rows: made by `rows.make_rows`.
  """
  found = cells(rows)
  lines = [
    line(found, name, case) for name in experiments_of(rows) for case in CASES
  ]
  return Table(HEADERS, lines, text_columns=(0, 1))
