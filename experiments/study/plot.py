"""Plot of the study: scores over bytes, and over time on each link."""

import os
from collections.abc import Sequence

from matplotlib.ticker import NullFormatter

from experiments.common import figures, tables
from experiments.common.records import Row
from experiments.study.rows import DIVERGED

_PANELS = {
  "bytes": "bytes that a worker sends in a run",
  "time_10mbit": "seconds of a run, 10 Mbit/s and 50 ms (predicted)",
  "time_100mbit": "seconds of a run, 100 Mbit/s and 10 ms (predicted)",
  "time_1gbit": "seconds of a run, 1 Gbit/s and 0.2 ms (predicted)",
}
_TICKS = 1, 1.5, 2, 3, 5, 10, 20, 50
_MARKERS = "os^Dv"


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws a line for each algorithm, a point for each length of its runs."""
  found = tables.index_rows(rows)
  metric = rows[0].metric.rsplit("_", 1)[0]
  is_share = rows[0].unit == "%"
  figure = figures.make_figure(12, 9)
  panels = figure.subplots(2, 2, sharey=True).ravel()
  cases = list(dict.fromkeys(row.case for row in rows))
  for axes, (kind, label) in zip(panels, _PANELS.items(), strict=True):
    for i, case in enumerate(cases):
      prefix = f"cost_{kind}_"
      costs = [row for row in rows if row.case == case and prefix in row.metric]
      points = [
        (row.value, found[case, row.metric.replace(prefix, f"{metric}_")].value)
        for row in costs
      ]
      points = [(x, y) for x, y in points if y != DIVERGED]
      axes.plot(
        [x for x, _ in points],
        # Logarithms show differences between small errors.
        [100 - float(y) if is_share else float(y) for _, y in points],
        color=f"C{i % 10}" if case != "fp32" else "black",
        linewidth=3 if case == "fp32" else 1.2,
        marker=_MARKERS[i // 10 % len(_MARKERS)],
        linestyle="-" if i < 10 else "--",
        markersize=4,
        label=case,
      )
    axes.set_xscale("log")
    if is_share:
      axes.set_yscale("log")
      axes.yaxis.set_minor_formatter(NullFormatter())
      axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.set_xlabel(label)
    axes.set_ylabel(
      "test error (%)" if is_share else f"{metric} ({rows[0].unit})"
    )
    axes.grid(alpha=0.3, which="both")
  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside right center")
  figure.suptitle("Lower and further left is better")
  figures.save_figure(figure, path)
