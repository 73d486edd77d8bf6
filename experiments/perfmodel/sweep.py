"""Predicted steps of split batches and split channels along five axes.

The study of Castello et al. (2021), with compression added.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import rich.progress

from experiments.perfmodel import reference, split_step
from jaxmotion import codecs, perfmodel

AXES = {
  "batch": tuple(4**i for i in range(3, 10)),
  "flops": tuple(4.0**i * 1e12 for i in range(-1, 6)),
  "memory": tuple(4.0**i * 50e9 for i in range(-2, 5)),
  "link": (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 400.0),
  "workers": tuple(4**i for i in range(1, 9)),
}
"""Values of each axis: images, FLOP/s, bytes/s, Gbit/s, nodes."""

UNITS = {
  "batch": "images of all workers",
  "flops": "FLOP/s of a node",
  "memory": "bytes/s of its memory",
  "link": "Gbit/s of its link",
  "workers": "nodes, of an image at least",
}
"""Labels of the axes in tables and plots."""
BASELINE = "data"
_BUCKET_BYTES = 25 << 20

STRATEGIES: dict[str, dict[str, Any]] = {
  "data": dict(data_axis="data"),
  "data bf16": dict(data_axis="data", codec=codecs.cast("bfloat16")),
  "data int8": dict(data_axis="data", codec=codecs.uniform(bits=8)),
  "data sign": dict(data_axis="data", codec=codecs.sign()),
  "model": dict(model_axis="data"),
  "model bf16": dict(
    model_axis="data", activation_codec=codecs.cast("bfloat16")
  ),
  "model int8": dict(
    model_axis="data", activation_codec=codecs.uniform(bits=8)
  ),
}
"""Arguments of `predict_split_step`; the platform has one axis, `data`."""


class Point(NamedTuple):
  """One predicted step of the sweep."""

  network: str  # Name of the network.
  axis: str  # Axis that is swept.
  value: float  # Value on that axis.
  strategy: str  # Name of one of `STRATEGIES`.
  step: perfmodel.StepPrediction  # Predicted step.


def platform_at(axis: str, value: float, workers: int) -> perfmodel.Platform:
  """Returns the cluster at a value of an axis.

  >>> platform_at("flops", 1e12, 64).device.matmul_flops_per_s["float32"]
  1000000000000.0
  """
  base = perfmodel.builtin_platform("ethernet_10gbit")
  device, (link_axis,) = base.device, base.axes
  if axis == "flops":
    device = dataclasses.replace(
      device, matmul_flops_per_s={"float32": value}, vector_flops_per_s=value
    )
  elif axis == "memory":
    device = dataclasses.replace(
      device, memory_rate=perfmodel.gbyte_per_s(value / 1e9)
    )
  elif axis == "link":
    link = dataclasses.replace(link_axis.link, rate=perfmodel.gbit_per_s(value))
    link_axis = dataclasses.replace(link_axis, link=link)
  nodes = int(value) if axis == "workers" else workers
  link_axis = dataclasses.replace(link_axis, workers=nodes)
  return dataclasses.replace(base, device=device, axes=(link_axis,), sources={})


def predict_point(
  network: str, axis: str, value: float, workers: int, batch: int
) -> list[Point]:
  """Predicts a step of every feasible strategy."""
  platform = platform_at(axis, value, workers)
  if axis == "batch":
    batch = int(value)
  elif axis == "workers":
    batch = max(batch, int(value))
  nodes = platform.axis("data").workers
  points: list[Point] = []
  for kind in ("data", "model"):
    if kind == "data" and batch % nodes:
      continue
    for name, options in STRATEGIES.items():
      if f"{kind}_axis" not in options:
        continue
      step = split_step.predict_split_step(
        _load_network(network),
        batch,
        platform,
        bucket_bytes=_BUCKET_BYTES,
        algorithm="halving_doubling",
        **options,
      )
      if step.memory_bytes > platform.device.memory_bytes:
        # The uncompressed strategy comes first: the others need as much.
        break
      points.append(Point(network, axis, value, name, step))
  return points


@functools.cache
def _load_network(name: str) -> reference.Network:
  return reference.reference_network(name)


def find_winners(
  points: Iterable[Point],
) -> dict[tuple[str, str, float], Point]:
  """Returns the fastest strategy by network, axis and value."""
  best: dict[tuple[str, str, float], Point] = {}
  for point in points:
    key = (point.network, point.axis, point.value)
    if key not in best or point.step.total_s < best[key].step.total_s:
      best[key] = point
  return best


def find_crossings(points: Iterable[Point]) -> dict[tuple[str, str], str]:
  """Returns the values from which each strategy is the fastest."""
  found: dict[tuple[str, str], list[str]] = {}
  last: dict[tuple[str, str], str] = {}
  for (network, axis, value), point in find_winners(points).items():
    key = (network, axis)
    if last.get(key) != point.strategy:
      found.setdefault(key, []).append(f"{point.strategy} from {value:g}")
      last[key] = point.strategy
  return {key: ", ".join(names) for key, names in found.items()}


def sweep_axes(
  networks: Sequence[str], axes: Sequence[str], workers: int, batch: int
) -> list[Point]:
  """Predicts all points of all axes."""
  places = [
    (network, axis, value)
    for network in networks
    for axis in axes
    for value in AXES[axis]
  ]
  points: list[Point] = []
  for place in rich.progress.track(places, "predicting"):
    points += predict_point(*place, workers, batch)
  return points
