"""Plot of training rows: score over bytes sent."""

import os
from collections.abc import Sequence

from experiments.common import figures
from experiments.common.records import Row


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws the score against the bytes a worker sends per step."""
  metric, unit = rows[0].metric, rows[0].unit
  sent = {
    row.case: float(row.value)
    for row in rows
    if row.metric == "wire_bytes_predicted"
  }
  scores = [row for row in rows if row.metric == metric]
  figure = figures.make_figure(7, 4.5)
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
  axes.set_xlabel("bytes that one worker sends per step (logarithmic)")
  axes.set_ylabel(f"{metric.replace('_', ' ')}, {unit}")
  axes.set_title(
    f"{metric.replace('_', ' ').capitalize()} against bytes\n"
    "mean ± standard deviation over seeds"
  )
  axes.grid(alpha=0.3)
  figures.save_figure(figure, path)
