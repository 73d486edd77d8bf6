"""From rows to tables and the plot."""

import os
import pathlib
from collections.abc import Sequence

import rich.table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments._rows import Row
from experiments.activations import _offload, _paper
from experiments.activations._findings import MEAN, PUBLISHED
from experiments.activations._measure import (
  CODES,
  OURS,
  PUBLISHED_CODE,
  Measured,
)


def ratio_table(rows: Sequence[Row]) -> rich.table.Table:
  """What each code makes of a network's activations.

  Args:
    rows: from `_findings.make_rows`.
  """
  cells = {(row.case, row.metric): row.value for row in rows}
  table = rich.table.Table(
    title="Bytes of float32 activations over those of a code, mean over"
    " training",
    caption=f"published: {_paper.SOURCE}, ImageNet, {CODES[PUBLISHED_CODE]}."
    " max: of a layer. Networks here are narrow and learn small images.",
  )
  table.add_column("network")
  codes = [code.replace("_", " ") for code in CODES]
  for header in ("accuracy, %", "zeros", *codes, "max zvc32"):
    table.add_column(header, justify="right")
  metrics = (
    "test_accuracy",
    "sparsity",
    *(f"{code}_ratio" for code in CODES),
    f"{PUBLISHED_CODE}_max_ratio",
  )
  for case in (*_nets(rows), MEAN, PUBLISHED):
    table.add_row(case, *(_cell(cells.get((case, m))) for m in metrics))
  return table


def gain_table(rows: Sequence[Row]) -> rich.table.Table:
  """By how much offloading gets faster.

  Args:
    rows: from `_findings.make_rows`.
  """
  cells = {(row.case, row.metric): row.value for row in rows}
  table = rich.table.Table(
    title="Per cent by which a step that offloads all activations is faster"
    " than without compression, predicted from datasheets",
    caption=f"224 pixels, batch 128. published: {_paper.SOURCE}, mean"
    f" {_paper.MEAN_GAIN:g} %, at most {_paper.MAX_GAIN:g} %. On a GPU: not"
    " measured.",
  )
  table.add_column("network")
  metrics = [
    f"predicted_{platform}_{code}_gain"
    for platform in _offload.PLATFORMS
    for code in (PUBLISHED_CODE, OURS, "no_transfer")
  ]
  for metric in metrics:
    words = metric.removeprefix("predicted_").removesuffix("_gain")
    table.add_column(words.replace("_", " "), justify="right")
  for case in (*_nets(rows), MEAN):
    table.add_row(case, *(_cell(cells[case, m]) for m in metrics))
  return table


def _nets(rows: Sequence[Row]) -> list[str]:
  return [row.case for row in rows if row.metric == "gpu_gain"]


def _cell(value: float | str | None) -> str:
  return "" if value is None else f"{float(value):.2f}"


def save_plot(
  measured: Sequence[Measured], path: str | os.PathLike[str]
) -> None:
  """Draws the share of zeros and the ratios over training.

  Args:
    measured: of all networks at all looks.
    path: of the image; its suffix chooses the format.
  """
  figure = Figure(figsize=(11, 4.5), layout="constrained")
  FigureCanvasAgg(figure)
  zeros, ratios = figure.subplots(1, 2)
  for i, net in enumerate(dict.fromkeys(look.net for look in measured)):
    looks = [look for look in measured if look.net == net]
    steps = [look.step for look in looks]
    color = f"C{i}"
    for layer in zip(*(look.layers for look in looks), strict=True):
      shares = [part.sparsity for part in layer]
      zeros.plot(steps, shares, color=color, alpha=0.15, linewidth=0.8)
    shares = [look.sparsity for look in looks]
    zeros.plot(steps, shares, color=color, marker="o", label=net)
    for code, style in ((OURS, "-"), (PUBLISHED_CODE, ":")):
      values = [look.ratio(code) for look in looks]
      ratios.plot(steps, values, style, color=color, label=f"{net}, {code}")
  zeros.set_ylabel("share of zeros; faint: of each layer")
  ratios.set_ylabel("ratio of all activations")
  ratios.axhline(_paper.MEAN_RATIO, color="black", linewidth=0.8)
  ratios.annotate(f"mean of {_paper.SOURCE}", (0, _paper.MEAN_RATIO))
  for axes in (zeros, ratios):
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlabel("steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
