"""Plot of the race: held-out loss over minutes, a panel for each link."""

import os
from collections.abc import Sequence
from typing import Any

from experiments.common import figures
from experiments.common.records import Row
from experiments.race import cases, rows as race_rows

_COLORS = 10


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws the first seed of the longest runs over the minutes of training."""
  grouped = race_rows.select_longest(race_rows.group_runs(rows))
  links = list(dict.fromkeys(group.link for group in grouped))
  names = list(dict.fromkeys(group.case for group in grouped))
  figure = figures.make_figure(10, 3.2 * len(links) + 0.8)
  panels = figure.subplots(len(links), 1, sharey=True, squeeze=False)[:, 0]
  for axes, link in zip(panels, links, strict=True):
    for group, runs in grouped.items():
      if group.link != link:
        continue
      case = group.case
      points = runs.curves[min(runs.curves)][1:]  # A logarithm has no 0.
      axes.plot(
        [point.minutes for point in points],
        [point.loss for point in points],
        color=f"C{names.index(case) % _COLORS}",
        linestyle="--" if cases.is_peer(case) else "-",
        linewidth=1.2,
        label=case,
      )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"minutes of training, {link}")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.grid(alpha=0.3, which="both")
  known: dict[str, Any] = {}
  for axes in panels:
    handles, labels = axes.get_legend_handles_labels()
    known |= dict(zip(labels, handles, strict=True))
  figure.legend(list(known.values()), list(known), loc="outside right center")
  figure.suptitle("Loss over minutes, by case; PyTorch's are dashed")
  figures.save_figure(figure, path)
