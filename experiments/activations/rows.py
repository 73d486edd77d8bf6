"""Rows and tables of activation ratios, predicted gains, and the paper's."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from experiments import models
from experiments.activations import measure, offload
from experiments.activations.codes import CODES, OURS, PUBLISHED_CODE
from experiments.common import records, tables

# Figures of Rhu et al., *Compressing DMA Engine: Leveraging Activation Sparsity
# for Training Deep Neural Networks*, 2017: AlexNet, OverFeat, NiN, VGG,
# SqueezeNet and GoogLeNet trained on ImageNet.
SOURCE = "arXiv:1705.01626"
MEAN_RATIO = 2.6
"""Mean ratio of zero-value coding over networks, layers and training."""
MAX_RATIO = 13.8
"""Greatest ratio of zero-value coding of a layer."""
MEAN_GAIN = 32.0
"""Mean over networks of the per cent that offloading gains by compression."""
MAX_GAIN = 61.0
"""Greatest gain of a network, in per cent."""

EXPERIMENT = "activations"
MEAN = "mean"
PUBLISHED = "published"
_BATCH = 128  # Images in the batch of a predicted step.


def make_rows(measured: Sequence[measure.Measured]) -> list[records.Row]:
  """Returns the rows of all networks, of their mean, and of the paper."""
  # The baseline of a ratio is the ratio of cDMA's code on the same activations.
  # A network's ratios are means over its snapshots, those of `mean` are means
  # over networks. The unit of a predicted figure says that it is predicted.
  nets: dict[str, list[measure.Measured]] = {}
  for each in measured:
    nets.setdefault(each.net, []).append(each)
  found = [row for own in nets.values() for row in _list_network(own)]
  found += _average_networks(found, list(nets))
  return found + _list_published()


def _make_row(
  case: str,
  metric: str,
  value: float | str,
  unit: str,
  baseline: float | None = None,
) -> records.Row:
  key = (EXPERIMENT, case, metric)
  return records.make_row(*key, records.Measured(value, unit), baseline)


def _list_network(snapshots: list[measure.Measured]) -> Iterator[records.Row]:
  """Yields the rows of one network: all steps, each step, each layer."""
  last = snapshots[-1]
  net = last.net
  yield _make_row(net, "test_accuracy", last.accuracy, "%")
  yield _make_row(net, "test_loss", last.loss, "nats")
  yield _make_row(
    net, "sparsity", _average(m.sparsity for m in snapshots), "share"
  )
  yield from _list_ratios(net, snapshots)
  layers = [layer for each in snapshots for layer in each.layers]
  most = max(layer.ratio(PUBLISHED_CODE) for layer in layers)
  yield _make_row(net, f"{PUBLISHED_CODE}_max_ratio", most, "x")
  error = max(layer.bf16_error for layer in layers)
  yield _make_row(net, "bf16_error", error, "share of the norm")
  overflows = _average(each.overflow_rate for each in snapshots)
  yield _make_row(net, "overflow_rate", overflows, "share of tiles")
  yield from _predict_gains(last)
  for each in snapshots:
    case = f"{net}_step{each.step}"
    yield _make_row(case, "sparsity", each.sparsity, "share")
    yield from _list_ratios(case, [each])
  for layer in last.layers:
    case = f"{net}/{layer.name}"
    yield _make_row(case, "sparsity", layer.sparsity, "share")
    base = layer.ratio(PUBLISHED_CODE)
    for code in (PUBLISHED_CODE, OURS):
      yield _make_row(case, f"{code}_ratio", layer.ratio(code), "x", base)


def _list_ratios(
  case: str, snapshots: list[measure.Measured]
) -> Iterator[records.Row]:
  base = _average(each.ratio(PUBLISHED_CODE) for each in snapshots)
  for code in CODES:
    ratio = _average(each.ratio(code) for each in snapshots)
    yield _make_row(case, f"{code}_ratio", ratio, "x", base)


def _predict_gains(measured: measure.Measured) -> Iterator[records.Row]:
  """Yields gains of the full-size network, with the narrow one's ratios."""
  net = models.make_network(measured.net)
  for name, platform in offload.PLATFORMS.items():
    stages = offload.predict_stages(net, _BATCH, platform.device)
    plain = offload.predict_step(stages, platform, 1.0)
    bound = offload.sum_compute(stages)
    metric = f"predicted_{name}"
    yield _make_row(
      measured.net, f"{metric}_step_ms", 1e3 * plain, "ms (predicted)"
    )
    gains = {"no_transfer": 100 * (plain / bound - 1)}
    for code in (PUBLISHED_CODE, OURS):
      ratios = {layer.name: layer.ratio(code) for layer in measured.layers}
      coded = offload.predict_step(stages, platform, ratios)
      gains[code] = 100 * (plain / coded - 1)
    for code, gain in gains.items():
      yield _make_row(
        measured.net, f"{metric}_{code}_gain", gain, "% (predicted)"
      )
  yield _make_row(measured.net, "gpu_gain", "not measured", "%")


def _average_networks(
  found: list[records.Row], nets: list[str]
) -> Iterator[records.Row]:
  """Yields means over the networks of the metrics that all of them have."""
  values = {(one.case, one.metric): one for one in found}
  for one in [one for one in found if one.case == nets[0]]:
    if one.metric == "gpu_gain":
      continue
    each = [values[net, one.metric] for net in nets]
    value = _average(float(e.value) for e in each)
    bases = [e.baseline for e in each if e.baseline is not None]
    yield _make_row(
      MEAN, one.metric, value, one.unit, _average(bases) if bases else None
    )


def _list_published() -> list[records.Row]:
  figures = {
    f"{PUBLISHED_CODE}_ratio": records.Measured(MEAN_RATIO, "x"),
    f"{PUBLISHED_CODE}_max_ratio": records.Measured(MAX_RATIO, "x"),
    "offload_gain": records.Measured(MEAN_GAIN, "%"),
    "max_offload_gain": records.Measured(MAX_GAIN, "%"),
  }
  cases = {PUBLISHED: figures}
  return records.make_rows(EXPERIMENT, cases, machine=SOURCE, version="not JAX")


def _average(values: Iterable[float]) -> float:
  return float(np.mean(list(values)))


def list_networks(rows: Sequence[records.Row]) -> list[str]:
  """Returns the names of the networks that rows measure, in order."""
  return [row.case for row in rows if row.metric == "gpu_gain"]


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
    caption=f"published: {SOURCE}, ImageNet, {CODES[PUBLISHED_CODE]}."
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
    caption=f"224 pixels, batch 128. published: {SOURCE}, mean"
    f" {MEAN_GAIN:g} %, at most {MAX_GAIN:g} %. On a GPU: not"
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
