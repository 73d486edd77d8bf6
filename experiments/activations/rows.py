"""Rows of activation ratios, of predicted gains, and of the paper's figures."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments import models
from experiments.activations import cases, measure, offload, paper
from experiments.common import records

EXPERIMENT = "activations"
MEAN = "mean"
PUBLISHED = "published"
_BATCH = 128  # Images in the batch of a predicted step.


class _Found(NamedTuple):
  """A figure before its machine and ratio are added."""

  case: str
  metric: str
  value: float | str
  unit: str
  baseline: float | None = None


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
  stamp = records.describe_machine(), jax.__version__
  return [
    *(_make_row(one, *stamp) for one in found),
    *(_make_row(one, paper.SOURCE, "not JAX") for one in _list_published()),
  ]


def _make_row(found: _Found, machine: str, version: str) -> records.Row:
  case, metric, value, unit, baseline = found
  ratio = float(value) / baseline if baseline else None
  named = EXPERIMENT, case, metric, value, unit
  return records.Row(*named, baseline, ratio, None, machine, version)


def _list_network(snapshots: list[measure.Measured]) -> Iterator[_Found]:
  last = snapshots[-1]
  net = last.net
  yield _Found(net, "test_accuracy", last.accuracy, "%")
  yield _Found(net, "test_loss", last.loss, "nats")
  yield _Found(
    net, "sparsity", _average(m.sparsity for m in snapshots), "share"
  )
  yield from _list_ratios(net, snapshots)
  layers = [layer for each in snapshots for layer in each.layers]
  most = max(layer.ratio(cases.PUBLISHED_CODE) for layer in layers)
  yield _Found(net, f"{cases.PUBLISHED_CODE}_max_ratio", most, "x")
  error = max(layer.bf16_error for layer in layers)
  yield _Found(net, "bf16_error", error, "share of the norm")
  overflows = _average(each.overflow_rate for each in snapshots)
  yield _Found(net, "overflow_rate", overflows, "share of tiles")
  yield from _predict_gains(last)
  for each in snapshots:
    case = f"{net}_step{each.step}"
    yield _Found(case, "sparsity", each.sparsity, "share")
    yield from _list_ratios(case, [each])
  for layer in last.layers:
    case = f"{net}/{layer.name}"
    yield _Found(case, "sparsity", layer.sparsity, "share")
    base = layer.ratio(cases.PUBLISHED_CODE)
    for code in (cases.PUBLISHED_CODE, cases.OURS):
      yield _Found(case, f"{code}_ratio", layer.ratio(code), "x", base)


def _list_ratios(
  case: str, snapshots: list[measure.Measured]
) -> Iterator[_Found]:
  base = _average(each.ratio(cases.PUBLISHED_CODE) for each in snapshots)
  for code in cases.CODES:
    ratio = _average(each.ratio(code) for each in snapshots)
    yield _Found(case, f"{code}_ratio", ratio, "x", base)


def _predict_gains(measured: measure.Measured) -> Iterator[_Found]:
  """Yields gains of the full-size network, with the narrow one's ratios."""
  net = models.make_network(measured.net)
  for name, platform in offload.PLATFORMS.items():
    stages = offload.predict_stages(net, _BATCH, platform.device)
    plain = offload.predict_step(stages, platform, 1.0)
    bound = offload.sum_compute(stages)
    metric = f"predicted_{name}"
    yield _Found(
      measured.net, f"{metric}_step_ms", 1e3 * plain, "ms (predicted)"
    )
    gains = {"no_transfer": 100 * (plain / bound - 1)}
    for code in (cases.PUBLISHED_CODE, cases.OURS):
      ratios = {layer.name: layer.ratio(code) for layer in measured.layers}
      coded = offload.predict_step(stages, platform, ratios)
      gains[code] = 100 * (plain / coded - 1)
    for code, gain in gains.items():
      yield _Found(measured.net, f"{metric}_{code}_gain", gain, "% (predicted)")
  yield _Found(measured.net, "gpu_gain", "not measured", "%")


def _average_networks(found: list[_Found], nets: list[str]) -> Iterator[_Found]:
  """Yields means over the networks of the metrics that all of them have."""
  values = {(one.case, one.metric): one for one in found}
  for one in [one for one in found if one.case == nets[0]]:
    if one.metric == "gpu_gain":
      continue
    each = [values[net, one.metric] for net in nets]
    value = _average(float(e.value) for e in each)
    bases = [e.baseline for e in each if e.baseline is not None]
    yield _Found(
      MEAN, one.metric, value, one.unit, _average(bases) if bases else None
    )


def _list_published() -> list[_Found]:
  gain = "offload_gain"
  return [
    _Found(PUBLISHED, f"{cases.PUBLISHED_CODE}_ratio", paper.MEAN_RATIO, "x"),
    _Found(
      PUBLISHED, f"{cases.PUBLISHED_CODE}_max_ratio", paper.MAX_RATIO, "x"
    ),
    _Found(PUBLISHED, gain, paper.MEAN_GAIN, "%"),
    _Found(PUBLISHED, f"max_{gain}", paper.MAX_GAIN, "%"),
  ]


def _average(values: Iterable[float]) -> float:
  return float(np.mean(list(values)))


def list_networks(rows: Sequence[records.Row]) -> list[str]:
  """Returns the names of the networks that rows measure, in order."""
  return [row.case for row in rows if row.metric == "gpu_gain"]
