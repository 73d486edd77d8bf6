"""Networks whose weights stay in host memory and come encoded, by segments.

Repeats of a block form segments, each a stage of `memory.HostResident`: the
device holds the inputs of segments and the weights of two segments. Inside a
segment `memory.compress_residuals` saves the inputs of blocks, in 8 bits.
"""

import dataclasses
import time
from typing import Any

import jax
import optax

from experiments import models
from experiments.residuals import cases, measure
from jaxmotion import core, memory
from jaxmotion.core import Array, PyTree

SEGMENT = 64
"""Number of repeats of a block that are on the device together."""


@dataclasses.dataclass(frozen=True)
class _Segment:
  """Some repeats of a block as a stage; equal segments share their programs."""

  block: models.Block
  repeats: int
  is_first: bool
  is_last: bool
  codec: Any

  def __call__(self, params: PyTree, x: Any, batch: PyTree) -> Array:
    """Runs the repeats, saving their inputs; the last one returns the loss."""
    inputs, labels = batch
    run = memory.compress_residuals(
      self.block, self.codec, params=0, memory_budget=0.0
    )
    x = inputs if self.is_first else x
    x = (
      run(params, x) if self.repeats == 1 else models.scan_block(run, params, x)
    )
    return models.cross_entropy(x, labels) if self.is_last else x


def make_streamed_model(
  net: models.Network,
  segment: int = SEGMENT,
  codec: Any = cases.INT8,
  **options: Any,
) -> memory.HostResident:
  """Returns a network as stages of segments, trained by gradient descent."""
  spans = [
    (stage.block, size)
    for stage in net.stages
    for size in _segment_sizes(stage.repeats, segment)
  ]
  last = len(spans) - 1
  stages = [
    (name, _Segment(block, size, i == 0, i == last, codec))
    for i, (name, (block, size)) in enumerate(
      zip(_segment_names(net, segment), spans, strict=True)
    )
  ]
  return memory.HostResident(
    stages, optax.sgd(0.1), stream_weights=True, update="per_stage", **options
  )


def split_params(
  net: models.Network, params: PyTree, segment: int = SEGMENT
) -> PyTree:
  """Splits the parameters of a network, or their shapes, into its segments."""
  if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
    return jax.eval_shape(lambda p: split_params(net, p, segment), params)
  parts = []
  for stage in net.stages:
    own, begin = params[stage.name], 0
    for size in _segment_sizes(stage.repeats, segment):
      # A segment of one repeat has no leading axis, like a stage of one.
      rows = begin if size == 1 else slice(begin, begin + size)
      alone = stage.repeats == 1
      parts.append(own if alone else jax.tree.map(lambda a, r=rows: a[r], own))
      begin += size
  return dict(zip(_segment_names(net, segment), parts, strict=True))


def compile_step(
  net: models.Network, batch: int, target: str, memory_gib: float | None = None
) -> measure.StepMemory:
  """Compiles all programs of a step, each once, and returns their memory."""
  machine = ""
  begin = time.monotonic()

  def measure_memory(fn: Any, *args: PyTree) -> int:
    nonlocal machine
    found = measure.compile_step(
      cases.StepProgram(fn, args), target, memory_gib
    )
    machine = found.machine
    return found.temp_bytes

  model, params = make_streamed_model(net), split_params(net, net.params)
  data = net.batch(batch)
  peak = model.device_bytes(params, data, measure_memory=measure_memory)
  data_bytes = core.tree_bytes(data)
  return measure.StepMemory(
    machine,
    peak - data_bytes,
    model.plain_bytes(params),
    data_bytes,
    0,
    time.monotonic() - begin,
  )


def _segment_sizes(repeats: int, segment: int) -> list[int]:
  count, last = divmod(repeats, segment)
  return [segment] * count + [last] * bool(last)


def _segment_names(net: models.Network, segment: int) -> list[str]:
  return [
    f"{stage.name}/{i}"
    for stage in net.stages
    for i in range(len(_segment_sizes(stage.repeats, segment)))
  ]
