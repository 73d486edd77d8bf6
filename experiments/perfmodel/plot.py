"""Plots of validated predictions and of the scaling study."""

import os
from collections.abc import Sequence

from experiments.common import figures, records
from experiments.perfmodel import sweep

_METRIC = "predicted_step_ms"


def plot_validation(
  rows: Sequence[records.Row], path: str | os.PathLike[str]
) -> None:
  """Draws predicted over measured steps, with a band of 15 %."""
  rows = [row for row in rows if row.metric == _METRIC]
  figure = figures.make_figure(6.5, 7)
  axes = figure.add_subplot()
  for experiment in dict.fromkeys(row.experiment for row in rows):
    own = [row for row in rows if row.experiment == experiment]
    errors = [abs(float(row.ratio or 0) - 1) for row in own]
    testbed = experiment.removeprefix("perfmodel_validate_")
    axes.errorbar(
      [_measured(row) for row in own],
      [float(row.value) for row in own],
      xerr=[row.noise or 0.0 for row in own],
      fmt="o",
      markersize=4,
      alpha=0.7,
      label=f"{testbed}: {sum(errors) / len(errors):.1%}",
    )
  ends = [pick(map(_measured, rows)) for pick in (min, max)]
  axes.plot(ends, ends, color="black", linewidth=1)
  axes.fill_between(
    ends, [0.85 * e for e in ends], [1.15 * e for e in ends], alpha=0.15
  )
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.grid(alpha=0.3)
  axes.set_xlabel("measured step, ms (bars: noise)")
  axes.set_ylabel("predicted step, ms (band: 15 %)")
  axes.set_title("Predicted steps that no calibration has seen")
  figure.legend(
    loc="outside lower center", ncols=2, title="mean absolute error by testbed"
  )
  figures.save_figure(figure, path)


def _measured(row: records.Row) -> float:
  assert row.baseline is not None
  return float(row.baseline)


def plot_scaling(
  rows: Sequence[records.Row], path: str | os.PathLike[str]
) -> None:
  """Draws the steps of every strategy, a plot for each network and axis."""
  curves: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
  for row in rows:
    strategy, _, place = row.case.rpartition(" ")
    axis, _, value = place.partition("=")
    network = row.experiment.removeprefix("perfmodel_scaling_")
    point = float(value), float(row.value) / 1e3
    curves.setdefault((network, axis, strategy), []).append(point)
  networks = list(dict.fromkeys(network for network, _, _ in curves))
  axes = list(dict.fromkeys(axis for _, axis, _ in curves))
  figure = figures.make_figure(2.6 * len(axes), 2.1 * len(networks) + 0.6)
  grid = figure.subplots(
    len(networks), len(axes), squeeze=False, sharex="col", sharey="row"
  )
  for network, line in zip(networks, grid, strict=True):
    for axis, plot in zip(axes, line, strict=True):
      for strategy in sweep.STRATEGIES:
        points = sorted(curves.get((network, axis, strategy), []))
        plot.plot(
          [x for x, _ in points],
          [y for _, y in points],
          "--" if strategy.startswith("model") else "-",
          label=strategy,
          marker=".",
          markersize=4,
        )
      plot.set_xscale("log")
      plot.set_yscale("log")
      plot.grid(alpha=0.3)
    line[0].set_ylabel(f"{network}\npredicted step, s")
  for axis, plot in zip(axes, grid[-1], strict=True):
    plot.set_xlabel(sweep.UNITS[axis])
  handles, labels = grid[0][0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
  figure.suptitle("Predicted steps of data and model parallelism")
  figures.save_figure(figure, path)
