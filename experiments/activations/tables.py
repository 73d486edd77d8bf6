"""From rows to tables and the plot."""

import os
import pathlib
from collections.abc import Sequence

import rich.table
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.activations import offload, paper
from experiments.activations.measure import CODES, OURS, PUBLISHED_CODE
from experiments.activations.rows import MEAN, PUBLISHED
from experiments.common.records import Row
from experiments.common.tables import Table, index_rows

# Metrics that the docs show, and the headings of their columns.
_SUMMARY = {
  "sparsity": "zeros",
  "rle_nhwc_ratio": "run lengths",
  "rle_nchw_ratio": "channels first",
  "zvc32_ratio": "ZVC, 32-bit words",
  "zero_value_ratio": "`zero_value`",
  "zvc16_ratio": "ZVC, bf16 words",
  "zero_value_bf16_ratio": "`zero_value` of bf16",
  "planes_zlib_ratio": "byte planes and zlib",
}


def ratio_table(rows: Sequence[Row]) -> rich.table.Table:
  """What each code makes of a network's activations.

  Args:
    rows: from `_findings.make_rows`.
  """
  cells = {(row.case, row.metric): row.value for row in rows}
  table = rich.table.Table(
    title="Bytes of float32 activations over those of a code, mean over"
    " training",
    caption=f"published: {paper.SOURCE}, ImageNet, {CODES[PUBLISHED_CODE]}."
    " max: of a layer. Networks here are narrow and learn small images.",
  )
  table.add_column("network", no_wrap=True)
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
    caption=f"224 pixels, batch 128. published: {paper.SOURCE}, mean"
    f" {paper.MEAN_GAIN:g} %, at most {paper.MAX_GAIN:g} %. On a GPU: not"
    " measured.",
  )
  table.add_column("network", no_wrap=True)
  metrics = [
    f"predicted_{platform}_{code}_gain"
    for platform in offload.PLATFORMS
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


def save_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
  """Draws the share of zeros and the ratios over training.

  Args:
    rows: from `_findings.make_rows`.
    path: of the image; its suffix chooses the format.
  """
  figure = Figure(figsize=(11, 4.5), layout="constrained")
  FigureCanvasAgg(figure)
  zeros, ratios = figure.subplots(1, 2)
  for i, net in enumerate(_nets(rows)):
    zeros.plot(*_curve(rows, net, "sparsity"), f"C{i}o-", label=net)
    for code, style in ((OURS, "-"), (PUBLISHED_CODE, ":")):
      ratios.plot(*_curve(rows, net, f"{code}_ratio"), f"C{i}{style}")
  zeros.set_ylabel("share of zeros of all activations")
  zeros.legend(fontsize="small")
  ratios.set_ylabel(f"ratio: {OURS} (solid), {PUBLISHED_CODE} (dotted)")
  ratios.axhline(paper.MEAN_RATIO, color="black", linewidth=0.8)
  words = f"{PUBLISHED_CODE}, mean of {paper.SOURCE}"
  ratios.annotate(words, (0, paper.MEAN_RATIO), va="bottom")
  for axes in (zeros, ratios):
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(left=0)
    axes.set_xlabel("steps")
    axes.grid(alpha=0.3)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)


def _curve(
  rows: Sequence[Row], net: str, metric: str
) -> tuple[list[int], list[float]]:
  """Steps, and what was found there."""
  start = f"{net}_step"
  points = [
    (int(row.case.removeprefix(start)), float(row.value))
    for row in rows
    if row.case.startswith(start) and row.metric == metric
  ]
  return [step for step, _ in points], [value for _, value in points]


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns the ratio of each code, a line for each network.

  Args:
    rows: made by `rows.make_rows`.
  """
  found = index_rows(rows)
  lines = [
    (
      case,
      *(f"{float(found[case, metric].value):.2f}" for metric in _SUMMARY),
    )
    for case, metric in found
    if metric == "planes_zlib_ratio" and "_step" not in case
  ]
  return Table(("network", *_SUMMARY.values()), lines)
