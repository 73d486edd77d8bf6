"""Networks whose weights live on the host and come packed, some at a time.

Repeats of a block become segments, each a stage of `memory.HostResident`: the
device holds the inputs of segments and the weights of two of them. Inside one,
`memory.compress_residuals` keeps the inputs of blocks, in 8 bits.
"""

import dataclasses
import time
from typing import Any

import jax
import optax

from experiments.models import Block, Network, cross_entropy, scan_block
from experiments.residuals import measure
from experiments.residuals.cases import INT8, Job
from jaxmotion import memory
from jaxmotion.core import Array, PyTree, tree_bytes

SEGMENT = 64
"""Repeats of a block that are on the device together."""


@dataclasses.dataclass(frozen=True)
class _Segment:
  """Some repeats of a block as a stage; equal ones share their programs."""

  block: Block
  repeats: int
  first: bool
  last: bool
  codec: Any

  def __call__(self, params: PyTree, x: Any, batch: PyTree) -> Array:
    inputs, labels = batch
    run = memory.compress_residuals(
      self.block, self.codec, params=0, recompute="all"
    )
    x = inputs if self.first else x
    x = run(params, x) if self.repeats == 1 else scan_block(run, params, x)
    return cross_entropy(x, labels) if self.last else x


def streamed(
  net: Network, segment: int = SEGMENT, codec: Any = INT8, **options: Any
) -> memory.HostResident:
  """A network as stages of segments, trained by gradient descent.

  Args:
    net: the network.
    segment: repeats of a block in a stage.
    codec: of the inputs of blocks.
    **options: of `memory.HostResident`.
  """
  spans = [
    (stage.block, size)
    for stage in net.stages
    for size in _sizes(stage.repeats, segment)
  ]
  last = len(spans) - 1
  stages = [
    (name, _Segment(block, size, i == 0, i == last, codec))
    for i, (name, (block, size)) in enumerate(
      zip(_names(net, segment), spans, strict=True)
    )
  ]
  return memory.HostResident(
    stages, optax.sgd(0.1), stream_weights=True, update="per_stage", **options
  )


def split(net: Network, params: PyTree, segment: int = SEGMENT) -> PyTree:
  """Parameters of a network, or their shapes, as those of its segments."""
  if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
    return jax.eval_shape(lambda p: split(net, p, segment), params)
  parts = []
  for stage in net.stages:
    own, begin = params[stage.name], 0
    for size in _sizes(stage.repeats, segment):
      # A segment of one has no leading axis, like a stage of one.
      rows = begin if size == 1 else slice(begin, begin + size)
      alone = stage.repeats == 1
      parts.append(own if alone else jax.tree.map(lambda a, r=rows: a[r], own))
      begin += size
  return dict(zip(_names(net, segment), parts, strict=True))


def compile_step(
  net: Network, batch: int, target: str, memory_gib: float | None = None
) -> measure.Memory:
  """Compiles all programs of a step, each once.

  Args:
    net: the network.
    batch: examples.
    target: of `TARGETS`.
    memory_gib: memory that the compiler is told of; None: what the GPU has.

  Returns:
    What the device holds at most, by `HostResident.device_bytes`;
    `host_temp_bytes` are the parameters, which live there.
  """
  machine = ""
  begin = time.monotonic()

  def measure_memory(fn: Any, *args: PyTree) -> int:
    nonlocal machine
    found = measure.compile_step(Job(fn, args), target, memory_gib)
    machine = found.machine
    return found.temp_bytes

  model, params = streamed(net), split(net, net.params)
  data = net.batch(batch)
  whole = model.device_bytes(params, data, measure_memory=measure_memory)
  given = tree_bytes(data)
  return measure.Memory(
    machine,
    whole - given,
    model.plain_bytes(params),
    given,
    0,
    time.monotonic() - begin,
  )


def _sizes(repeats: int, segment: int) -> list[int]:
  whole, rest = divmod(repeats, segment)
  return [segment] * whole + [rest] * bool(rest)


def _names(net: Network, segment: int) -> list[str]:
  return [
    f"{stage.name}/{i}"
    for stage in net.stages
    for i in range(len(_sizes(stage.repeats, segment)))
  ]
