"""Plots of validated predictions and of the scaling study."""

import os
import pathlib
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.perfmodel.score import Pair, score_errors
from experiments.perfmodel.sweep import STRATEGIES, UNITS, Point


def plot_validation(
  pairs: Sequence[Pair], path: str | os.PathLike[str]
) -> None:
  """Draws predicted over measured steps, with a band of 15 %.

  Args:
    pairs: steps of any testbeds.
    path: file of the image; its suffix chooses the format.
  """
  figure = Figure(figsize=(6.5, 6), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  for testbed in dict.fromkeys(pair.testbed for pair in pairs):
    own = [pair for pair in pairs if pair.testbed == testbed]
    measured = [1e3 * pair.measured_s for pair in own]
    axes.errorbar(
      measured,
      [1e3 * pair.predicted_s for pair in own],
      xerr=[m * pair.noise for m, pair in zip(measured, own, strict=True)],
      fmt="o",
      markersize=4,
      alpha=0.7,
      label=f"{testbed}: {score_errors(own).mape:.1%}",
    )
  ends = [1e3 * f(pair.measured_s for pair in pairs) for f in (min, max)]
  axes.plot(ends, ends, color="black", linewidth=1)
  axes.fill_between(
    ends, [0.85 * e for e in ends], [1.15 * e for e in ends], alpha=0.15
  )
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlabel("measured step, ms (bars: noise)")
  axes.set_ylabel("predicted step, ms (band: 15 %)")
  axes.set_title("Held-out steps; mean absolute error by testbed")
  axes.legend()
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)


def plot_scaling(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
  """Draws the steps of every strategy, a plot for each network and axis.

  Args:
    points: points of any networks and axes.
    path: file of the image; its suffix chooses the format.
  """
  networks = list(dict.fromkeys(point.network for point in points))
  axes = list(dict.fromkeys(point.axis for point in points))
  size = (3.2 * len(axes), 2.6 * len(networks) + 0.6)
  figure = Figure(figsize=size, layout="constrained")
  FigureCanvasAgg(figure)
  grid = figure.subplots(len(networks), len(axes), squeeze=False)
  for network, line in zip(networks, grid, strict=True):
    for axis, plot in zip(axes, line, strict=True):
      for strategy in STRATEGIES:
        own = [
          point
          for point in points
          if point[:2] == (network, axis) and point.strategy == strategy
        ]
        plot.plot(
          [point.value for point in own],
          [point.step.total_s for point in own],
          "--" if strategy.startswith("model") else "-",
          label=strategy,
          marker=".",
        )
      plot.set_xscale("log")
      plot.set_yscale("log")
      plot.set_title(network, fontsize="small")
      plot.set_xlabel(UNITS[axis], fontsize="small")
      plot.set_ylabel("predicted step, s", fontsize="small")
      plot.grid(alpha=0.3)
  handles, labels = grid[0][0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)
