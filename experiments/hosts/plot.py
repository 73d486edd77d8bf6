"""Plot of cases timed on hosts: step times and what the link allows."""

import os
import pathlib
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common.records import Row


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws the step time of every case, and what the link allows.

  Args:
    rows: made by `rows.make_rows`.
    path: file of the image; its suffix chooses the format.
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
