"""Plot of training rows: score over bytes sent."""

import os
import pathlib
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common.records import Row


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws the score against the bytes a worker sends per step.

  Args:
    rows: made by `rows.make_rows`; the first one is a score.
    path: file of the image; its suffix chooses the format.
  """
  metric, unit = rows[0].metric, rows[0].unit
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
      xytext=(0, 6 + 12 * (i % 2)),  # Two heights: neighbors do not touch.
      textcoords="offset points",
      color=marker.get_color(),
      ha="center",
    )
  axes.set_xscale("log")
  axes.margins(0.2)
  axes.set_xlabel("bytes one worker sends per step")
  axes.set_ylabel(f"{metric} ({unit})")
  axes.set_title(f"{rows[0].experiment}: mean and spread over the seeds")
  axes.grid(alpha=0.3)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
