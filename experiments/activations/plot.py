"""Plot of activation rows: zeros and ratios over training."""

import os
from collections.abc import Sequence

from experiments.activations import codes
from experiments.activations.rows import MEAN_RATIO, SOURCE, list_networks
from experiments.common import figures, records


def save_plot(
  rows: Sequence[records.Row], path: str | os.PathLike[str]
) -> None:
  """Draws the share of zeros and the ratios over training."""
  figure = figures.make_figure(11, 4.5)
  zeros, ratios = figure.subplots(1, 2)
  for i, net in enumerate(list_networks(rows)):
    zeros.plot(*_read_curve(rows, net, "sparsity"), f"C{i}o-", label=net)
    for code, style in ((codes.OURS, "-"), (codes.PUBLISHED_CODE, ":")):
      ratios.plot(*_read_curve(rows, net, f"{code}_ratio"), f"C{i}{style}")
  zeros.set_ylabel("share of zeros of all activations")
  ratios.set_ylabel(
    f"ratio: {codes.OURS} (solid), {codes.PUBLISHED_CODE} (dotted)"
  )
  ratios.axhline(MEAN_RATIO, color="black", linewidth=0.8)
  label = f"{codes.PUBLISHED_CODE}, mean of {SOURCE}"
  ratios.annotate(label, (0, MEAN_RATIO), va="bottom")
  for axes in (zeros, ratios):
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(left=0)
    axes.set_xlabel("steps (logarithmic from 10)")
    axes.grid(alpha=0.3)
  handles, labels = zeros.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
  figure.suptitle("Zeros among activations, and the ratio that they allow")
  figures.save_figure(figure, path)


def _read_curve(
  rows: Sequence[records.Row], net: str, metric: str
) -> tuple[list[int], list[float]]:
  """Returns the steps of a network, and a metric at each of them."""
  start = f"{net}_step"
  points = [
    (int(row.case.removeprefix(start)), float(row.value))
    for row in rows
    if row.case.startswith(start) and row.metric == metric
  ]
  return [step for step, _ in points], [value for _, value in points]
