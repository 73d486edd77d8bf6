"""The optimization problem that `advise` solves."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmotion import codecs, core, perfmodel
from jaxmotion.collectives.extend import shard_like
from jaxmotion.core import PyTree
from jaxmotion.perfmodel import extend
from jaxmotion.planner import _text
from jaxmotion.planner.exchange import _errors


class BucketSchedule(NamedTuple):
  """Buckets of gradients and the computation between them.

  Attributes:
    buckets: positions of the tensors of each bucket, earliest bucket first.
    gaps_s: seconds of computation before each bucket is ready, and after the
      last one.
    tail_s: seconds of the optimizer update and of calling the program.
  """

  buckets: tuple[tuple[int, ...], ...]
  gaps_s: tuple[float, ...]
  tail_s: float


def schedule_buckets(
  step_cost: perfmodel.StepCost,
  device: perfmodel.Device,
  bucket_bytes: int | None,
) -> BucketSchedule:
  """Returns the buckets that `perfmodel.predict_step` exchanges."""
  ready = extend.predict_ready_seconds(step_cost.gradient, device)[1:]
  leaves = jax.tree.leaves(step_cost.params)
  order = sorted(range(len(leaves)), key=lambda i: ready[i])
  size_of = lambda i: core.tree_bytes(leaves[i])
  filled = extend.fill_buckets(order, size_of, bucket_bytes)
  buckets = tuple(map(tuple, filled))
  ends = [0.0, *(ready[bucket[-1]] for bucket in buckets)]
  compute_s = perfmodel.predict_seconds(step_cost.gradient, device)
  gaps = [b - a for a, b in zip(ends, [*ends[1:], compute_s], strict=True)]
  gaps[-1] = max(gaps[-1], 0.0)
  tail_s = perfmodel.predict_seconds(step_cost.update, device) + device.call_s
  return BucketSchedule(buckets, tuple(gaps), tail_s)


@dataclasses.dataclass(frozen=True, eq=False)
class ExchangeProblem:
  """The step, the candidates and the error budget of an exchange.

  `advise` has checked all of this; nothing here or below checks again.

  Fields are the arguments of `advise`. Of the candidates, the first is full
  precision; errors are those of every candidate on every tensor.
  """

  step_cost: perfmodel.StepCost
  platform: perfmodel.Platform
  mesh_axis: str | core.HostAxes
  candidates: tuple[codecs.Codec, ...]
  errors: _errors.EncodingErrors
  accuracy_budget: float
  bucket_bytes: int | None = None
  overlap: bool = True

  @functools.cached_property
  def workers(self) -> int:
    """Number of workers, or hosts, in the exchange."""
    return self.platform.axis(core.split_axes(self.mesh_axis)[0]).workers

  @functools.cached_property
  def devices(self) -> int | None:
    """Number of devices of a host, if they reduce first."""
    devices = core.split_axes(self.mesh_axis)[1]
    return self.platform.axis(devices).workers if devices else None

  @functools.cached_property
  def schedule(self) -> BucketSchedule:
    """Buckets of gradients in the order of the backward pass."""
    return schedule_buckets(
      self.step_cost, self.platform.device, self.bucket_bytes
    )

  @functools.cached_property
  def squared_limits(self) -> tuple[np.ndarray, float]:
    """Squared errors of every codec on every tensor, and their limit."""
    return self.errors.squared_limits(self.accuracy_budget)

  def explain_memory(self, needed: float) -> str | None:
    """Says that so many bytes do not fit the device, or nothing if they do."""
    have = self.platform.device.memory_bytes
    if needed <= have:
      return None
    size = _text.format_bytes
    return f"needs {size(needed)} of memory, and the device has {size(have)}"

  def is_affordable(self, choice: np.ndarray) -> bool:
    """Returns whether the errors of int[tensors] codecs fit in the budget."""
    errors, limit = self.squared_limits
    return bool(errors[np.arange(len(choice)), choice].sum() <= limit)

  @functools.cached_property
  def distinct_leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
    """One parameter of each shape, by its path: enough to trace a preset."""
    by_type: dict[Any, tuple[str, jax.ShapeDtypeStruct]] = {}
    for path, leaf in core.named_leaves(self.step_cost.params):
      by_type.setdefault((leaf.shape, leaf.dtype), (path, leaf))
    return dict(by_type.values())

  def exchanged_tree(self) -> PyTree:
    """Returns shapes of what each worker, or each device of a host, encodes."""
    devices = self.devices
    if devices is None:
      return self.step_cost.params
    return jax.tree.map(lambda a: shard_like(a, devices), self.step_cost.params)

  def predict_step(
    self, codec: codecs.Codec | None, method: str | None
  ) -> perfmodel.StepPrediction:
    """Predicts the step whose gradients travel by one codec."""
    return perfmodel.predict_step(
      self.step_cost,
      self.platform,
      self.mesh_axis,
      codec,
      bucket_bytes=self.bucket_bytes,
      overlap=self.overlap,
      method=method,
    )
