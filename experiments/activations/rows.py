"""From what was measured to rows, the paper's among them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments import models
from experiments.activations import offload, paper
from experiments.activations.measure import (
  CODES,
  OURS,
  PUBLISHED_CODE,
  Measured,
)
from experiments.common import records
from experiments.common.records import Row

EXPERIMENT = "activations"
MEAN = "mean"
PUBLISHED = "published"
_BATCH = 128  # Images of a predicted step.


class _Found(NamedTuple):
  case: str
  metric: str
  value: float | str
  unit: str
  baseline: float | None = None


def make_rows(measured: Sequence[Measured]) -> list[Row]:
  """Everything that was found.

  Ratios have that of cDMA's code on the same activations as a baseline. Those
  of a network are means over the looks, those of `mean` are over networks.
  What is predicted says so in its unit.

  Args:
    measured: of all networks at all looks.
  """
  nets: dict[str, list[Measured]] = {}
  for look in measured:
    nets.setdefault(look.net, []).append(look)
  found = [row for looks in nets.values() for row in _of_net(looks)]
  found += _means(found, list(nets))
  stamp = records.describe_machine(), jax.__version__
  return [
    *(_row(one, *stamp) for one in found),
    *(_row(one, paper.SOURCE, "not JAX") for one in _published()),
  ]


def _row(found: _Found, machine: str, version: str) -> Row:
  case, metric, value, unit, baseline = found
  ratio = float(value) / baseline if baseline else None
  named = EXPERIMENT, case, metric, value, unit
  return Row(*named, baseline, ratio, None, machine, version)


def _of_net(looks: list[Measured]) -> Iterator[_Found]:
  last = looks[-1]
  net = last.net
  yield _Found(net, "test_accuracy", last.accuracy, "%")
  yield _Found(net, "loss", last.loss, "nats")
  yield _Found(net, "sparsity", _mean(m.sparsity for m in looks), "share")
  yield from _ratios(net, looks)
  layers = [layer for look in looks for layer in look.layers]
  most = max(layer.ratio(PUBLISHED_CODE) for layer in layers)
  yield _Found(net, f"{PUBLISHED_CODE}_max_ratio", most, "x")
  error = max(layer.bf16_error for layer in layers)
  yield _Found(net, "bf16_error", error, "share of the norm")
  overflows = _mean(look.overflow_rate for look in looks)
  yield _Found(net, "overflow_rate", overflows, "share of tiles")
  yield from _gains(last)
  for look in looks:
    case = f"{net}_step{look.step}"
    yield _Found(case, "sparsity", look.sparsity, "share")
    yield from _ratios(case, [look])
  for layer in last.layers:
    case = f"{net}/{layer.name}"
    yield _Found(case, "sparsity", layer.sparsity, "share")
    base = layer.ratio(PUBLISHED_CODE)
    for code in (PUBLISHED_CODE, OURS):
      yield _Found(case, f"{code}_ratio", layer.ratio(code), "x", base)


def _ratios(case: str, looks: list[Measured]) -> Iterator[_Found]:
  base = _mean(look.ratio(PUBLISHED_CODE) for look in looks)
  for code in CODES:
    ratio = _mean(look.ratio(code) for look in looks)
    yield _Found(case, f"{code}_ratio", ratio, "x", base)


def _gains(look: Measured) -> Iterator[_Found]:
  """Of the network at full size, whose layers compress as the small one's."""
  net = models.make_network(look.net)
  for name, platform in offload.PLATFORMS.items():
    stages = offload.stages(net, _BATCH, platform.device)
    plain = offload.step_seconds(stages, platform, 1.0)
    bound = offload.compute_seconds(stages)
    metric = f"predicted_{name}"
    yield _Found(look.net, f"{metric}_step_ms", 1e3 * plain, "ms (predicted)")
    gains = {"no_transfer": 100 * (plain / bound - 1)}
    for code in (PUBLISHED_CODE, OURS):
      ratios = {layer.name: layer.ratio(code) for layer in look.layers}
      coded = offload.step_seconds(stages, platform, ratios)
      gains[code] = 100 * (plain / coded - 1)
    for code, gain in gains.items():
      yield _Found(look.net, f"{metric}_{code}_gain", gain, "% (predicted)")
  yield _Found(look.net, "gpu_gain", "not measured", "%")


def _means(found: list[_Found], nets: list[str]) -> Iterator[_Found]:
  """Over the networks, of what all of them have."""
  values = {(one.case, one.metric): one for one in found}
  for one in [one for one in found if one.case == nets[0]]:
    if one.metric == "gpu_gain":
      continue
    each = [values[net, one.metric] for net in nets]
    value = _mean(float(e.value) for e in each)
    bases = [e.baseline for e in each if e.baseline is not None]
    yield _Found(
      MEAN, one.metric, value, one.unit, _mean(bases) if bases else None
    )


def _published() -> list[_Found]:
  gain = "offload_gain"
  return [
    _Found(PUBLISHED, f"{PUBLISHED_CODE}_ratio", paper.MEAN_RATIO, "x"),
    _Found(PUBLISHED, f"{PUBLISHED_CODE}_max_ratio", paper.MAX_RATIO, "x"),
    _Found(PUBLISHED, gain, paper.MEAN_GAIN, "%"),
    _Found(PUBLISHED, f"max_{gain}", paper.MAX_GAIN, "%"),
  ]


def _mean(values: Iterable[float]) -> float:
  return float(np.mean(list(values)))
