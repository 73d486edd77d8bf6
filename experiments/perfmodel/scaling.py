"""Predicts where splitting the batch, the channels, or compressing wins.

  python -m experiments.perfmodel.scaling --json=perfmodel_scaling.jsonl \
    --plot=perfmodel_scaling.png

The study of Castello et al. (2021), with compression: data parallelism against
model parallelism (channels of every layer split) on five axes, one at a time
around a cluster of `--workers` nodes: images a batch, FLOP/s of a node, its
memory's rate, that of its link, and the number of nodes. All of it is
predicted by `jaxmotion.perfmodel`; nothing is measured.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import rich.progress
import rich.table
from absl import app, flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.models import reference_network
from jaxmotion import codecs, perfmodel
from jaxmotion.perfmodel import Platform, gbit_per_s, gbyte_per_s

_NETWORKS = flags.DEFINE_list(
  "networks", ["alexnet", "vgg16", "resnet50", "googlenet"], "Of the zoo."
)
_AXES = flags.DEFINE_list(
  "axes", ["batch", "flops", "memory", "link", "workers"], "To sweep."
)
_STUDY_WORKERS = flags.DEFINE_integer(
  "study_workers", 64, "Nodes where their number is not swept.", 2
)
_STUDY_BATCH = flags.DEFINE_integer(
  "study_batch", 1024, "Images a batch where they are not swept.", 1
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()

AXES = {
  "batch": tuple(4**i for i in range(3, 10)),
  "flops": tuple(4.0**i * 1e12 for i in range(-1, 6)),
  "memory": tuple(4.0**i * 50e9 for i in range(-2, 5)),
  "link": (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 400.0),
  "workers": tuple(4**i for i in range(1, 9)),
}
"""Values of each axis: images, FLOP/s, bytes/s, Gbit/s, nodes."""

_UNITS = {
  "batch": "images of all workers",
  "flops": "FLOP/s of a node",
  "memory": "bytes/s of its memory",
  "link": "Gbit/s of its link",
  "workers": "nodes, of an image at least",
}
_BASELINE = "data"
_PLAIN = (_BASELINE, "model")
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
  """One predicted step.

  Attributes:
    network: name of it.
    axis: that is swept.
    value: on that axis.
    strategy: one of `STRATEGIES`.
    step: what was predicted.
  """

  network: str
  axis: str
  value: float
  strategy: str
  step: perfmodel.StepPrediction


def platform_at(axis: str, value: float, workers: int) -> Platform:
  """The cluster at a value of an axis; without a value, the one around which.

  Args:
    axis: one of `AXES`.
    value: on it.
    workers: nodes, unless they are what is swept.

  >>> platform_at("flops", 1e12, 64).device.matmul_flops_per_s["float32"]
  1000000000000.0
  """
  base = perfmodel.builtin_platform("ethernet_10gbit")
  device, (link_axis,) = base.device, base.axes
  if axis == "flops":
    device = dataclasses.replace(
      device,
      matmul_flops_per_s={"float32": value},
      vector_flops_per_s=value,
    )
  elif axis == "memory":
    device = dataclasses.replace(device, memory_rate=gbyte_per_s(value / 1e9))
  elif axis == "link":
    link = dataclasses.replace(link_axis.link, rate=gbit_per_s(value))
    link_axis = dataclasses.replace(link_axis, link=link)
  nodes = int(value) if axis == "workers" else workers
  link_axis = dataclasses.replace(link_axis, workers=nodes)
  return dataclasses.replace(base, device=device, axes=(link_axis,), sources={})


def predict(
  network: str, axis: str, value: float, workers: int, batch: int
) -> list[Point]:
  """Predicts a step of every strategy that can be.

  Args:
    network: of the zoo.
    axis: one of `AXES`.
    value: on it.
    workers: nodes, unless they are what is swept; a power of two.
    batch: images, unless they are what is swept; of more nodes, one for each.

  Returns:
    The points; splitting the batch takes an image a node at least, and what
    does not fit into the memory of a node is left out.
  """
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
      step = perfmodel.predict_split_step(
        _network(network),
        batch,
        platform,
        bucket_bytes=_BUCKET_BYTES,
        algorithm="halving_doubling",
        **options,
      )
      if step.memory_bytes > platform.device.memory_bytes:
        break  # What is not compressed comes first: the others need as much.
      points.append(Point(network, axis, value, name, step))
  return points


@functools.cache
def _network(name: str) -> perfmodel.Network:
  return reference_network(name)


def winners(points: Iterable[Point]) -> dict[tuple[str, str, float], Point]:
  """The fastest strategy by network, axis and value."""
  best: dict[tuple[str, str, float], Point] = {}
  for point in points:
    key = (point.network, point.axis, point.value)
    if key not in best or point.step.total_s < best[key].step.total_s:
      best[key] = point
  return best


def crossings(points: Iterable[Point]) -> dict[tuple[str, str], str]:
  """Where another strategy becomes the fastest.

  Args:
    points: in the order of their axes.

  Returns:
    By network and axis: the strategies from the least to the largest value,
    each with the value from which it is the fastest.
  """
  found: dict[tuple[str, str], list[str]] = {}
  last: dict[tuple[str, str], str] = {}
  for (network, axis, value), point in winners(points).items():
    key = (network, axis)
    if last.get(key) != point.strategy:
      found.setdefault(key, []).append(f"{point.strategy} from {value:g}")
      last[key] = point.strategy
  return {key: ", ".join(names) for key, names in found.items()}


def make_table(points: Sequence[Point]) -> rich.table.Table:
  """A line for each network and axis: without compression, and of all."""
  table = rich.table.Table(
    title="The fastest way, from which value on (predicted)"
  )
  for name in ("network", "axis", "without compression", "of all"):
    table.add_column(name)
  plain = crossings(p for p in points if p.strategy in _PLAIN)
  for (network, axis), text in crossings(points).items():
    own = f"{axis}, {_UNITS[axis]}"
    table.add_row(network, own, plain[network, axis], text)
  return table


def make_rows(points: Sequence[Point]) -> list[records.Row]:
  """A row for each step; its baseline is that of `data` at the same value."""
  base = {
    point[:3]: 1e3 * point.step.total_s
    for point in points
    if point.strategy == _BASELINE
  }
  rows = []
  for point in points:
    step_ms, plain = 1e3 * point.step.total_s, base.get(point[:3])
    rows.append(
      records.Row(
        f"perfmodel_scaling_{point.network}",
        f"{point.strategy} {point.axis}={point.value:g}",
        "predicted_step_ms",
        step_ms,
        "ms",
        plain,
        step_ms / plain if plain else None,
        None,
        "predicted, ethernet_10gbit",
        jax.__version__,
      )
    )
  return rows


def save_plot(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
  """Draws the steps of every strategy, a plot for each network and axis.

  Args:
    points: of any networks and axes.
    path: of the image; its suffix chooses the format.
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
      plot.set_xlabel(_UNITS[axis], fontsize="small")
      plot.set_ylabel("predicted step, s", fontsize="small")
      plot.grid(alpha=0.3)
  handles, labels = grid[0][0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)


def main() -> None:
  """Predicts, and prints where which strategy is the fastest."""
  for axis in _AXES.value:
    if axis not in AXES:
      raise app.UsageError(
        f"`--axes` must be some of {', '.join(AXES)}, got {axis!r}."
      )
  places = [
    (network, axis, value)
    for network in _NETWORKS.value
    for axis in _AXES.value
    for value in AXES[axis]
  ]
  points: list[Point] = []
  for place in rich.progress.track(places, "predicting"):
    points += predict(*place, _STUDY_WORKERS.value, _STUDY_BATCH.value)
  make_console().print(make_table(points))
  if _JSON.value:
    records.write_rows(_JSON.value, make_rows(points))
  if _PLOT.value:
    save_plot(points, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
