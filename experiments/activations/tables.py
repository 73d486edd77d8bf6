"""Tables of activation rows: ratios of the codes, and predicted gains."""

from collections.abc import Sequence

from experiments.activations import offload, paper
from experiments.activations.cases import CODES, OURS, PUBLISHED_CODE
from experiments.activations.rows import MEAN, PUBLISHED, list_networks
from experiments.common import records, tables

# Metrics that the docs show, and the names of their lines.
_SUMMARY = {
  "sparsity": "share of zeros",
  "rle_nhwc_ratio": "run lengths, channels last",
  "rle_nchw_ratio": "run lengths, channels first",
  "zvc32_ratio": "ZVC of float32",
  "zero_value_ratio": "`zero_value` of float32",
  "zvc16_ratio": "ZVC of bf16",
  "zero_value_bf16_ratio": "`zero_value` of bf16",
  "planes_zlib_ratio": "byte planes and zlib",
}


def ratio_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the accuracy, the zeros and the ratio of each code by network."""
  metrics = (
    "test_accuracy",
    "sparsity",
    *(f"{code}_ratio" for code in CODES),
    f"{PUBLISHED_CODE}_max_ratio",
  )
  codes = [code.replace("_", " ") for code in CODES]
  return tables.Table(
    ("network", "accuracy, %", "zeros", *codes, "greatest zvc32"),
    _list_lines(rows, (*list_networks(rows), MEAN, PUBLISHED), metrics),
    title="Bytes of float32 activations over the bytes of a code, mean over"
    " training",
    caption=f"published: {paper.SOURCE}, ImageNet, {CODES[PUBLISHED_CODE]}."
    " greatest: of a layer. Networks here are narrow and learn small images.",
  )


def gain_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the predicted gain of a step that offloads all activations."""
  metrics = [
    f"predicted_{platform}_{code}_gain"
    for platform in offload.PLATFORMS
    for code in (PUBLISHED_CODE, OURS, "no_transfer")
  ]
  headings = [
    metric.removeprefix("predicted_").removesuffix("_gain").replace("_", " ")
    for metric in metrics
  ]
  return tables.Table(
    ("network", *headings),
    _list_lines(rows, (*list_networks(rows), MEAN), metrics),
    title="Per cent by which a step that offloads all activations is faster"
    " than without compression, predicted from datasheets",
    caption=f"224 pixels, batch 128. published: {paper.SOURCE}, mean"
    f" {paper.MEAN_GAIN:g} %, at most {paper.MAX_GAIN:g} %. On a GPU: not"
    " measured.",
  )


def _list_lines(
  rows: Sequence[records.Row], cases: Sequence[str], metrics: Sequence[str]
) -> list[list[str]]:
  """Returns a line for each case; a missing figure is empty."""
  found = tables.index_rows(rows)

  def format_cell(case: str, metric: str) -> str:
    row = found.get((case, metric))
    return "" if row is None else f"{float(row.value):.2f}"

  return [
    [case, *(format_cell(case, metric) for metric in metrics)] for case in cases
  ]


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the ratio of each code, a line for each code."""
  found = tables.index_rows(rows)
  cases = [
    case
    for case, metric in found
    if metric == "planes_zlib_ratio" and "_step" not in case
  ]
  lines = [
    (name, *(f"{float(found[case, metric].value):.2f}" for case in cases))
    for metric, name in _SUMMARY.items()
  ]
  return tables.Table(("code", *cases), lines)
