"""Plot of unequal workers: step time over its ideal, loss over equal shares."""

import os
from collections.abc import Sequence

from matplotlib.axes import Axes

from experiments.common import figures
from experiments.common.records import Row
from experiments.hetero import cases, rows as hetero_rows


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws step time over its ideal, and the loss over that of equal shares."""
  figure = figures.make_figure(10, 4.5)
  left, right = figure.subplots(1, 2)
  _draw_bars(
    left, rows, "ideal_ratio", "step time over that of the ideal split"
  )
  left.axhline(1.0, color="black", linewidth=1)
  left.axhline(1.1, color="black", linewidth=1, linestyle=":")
  _draw_bars(right, rows, "loss_gap", "training loss less that of equal, nats")
  handles, labels = left.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
  figure.suptitle(
    "Workers of unequal speed: time and loss of each division (emulated)"
  )
  figures.save_figure(figure, path)


def _draw_bars(
  axes: Axes, rows: Sequence[Row], metric: str, label: str
) -> None:
  found = hetero_rows.index_experiments(rows)
  names = hetero_rows.list_experiments(rows)
  width = 0.8 / len(cases.CASES)
  for i, case in enumerate(cases.CASES):
    shown = [found[name, case, metric] for name in names]
    axes.bar(
      [j + (i - (len(cases.CASES) - 1) / 2) * width for j in range(len(names))],
      [float(row.value) for row in shown],
      width,
      yerr=[row.noise or 0.0 for row in shown],
      capsize=2,
      label=case,
    )
  short = [name.removeprefix("hetero_") for name in names]
  for deal in cases.DEALS:
    short = [name.replace(f"_{deal}", f"\n{deal}") for name in short]
  axes.set_xticks(range(len(names)), short, fontsize=8)
  axes.set_ylabel(label)
  axes.grid(axis="y", alpha=0.3)
