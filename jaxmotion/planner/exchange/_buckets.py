"""Groups gradients into buckets in the order in which they are computed."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from jaxmotion import core, perfmodel


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
  ready = perfmodel.predict_ready_seconds(step_cost.gradient, device)[1:]
  leaves = jax.tree.leaves(step_cost.params)
  order = sorted(range(len(leaves)), key=lambda i: ready[i])
  threshold = math.inf if bucket_bytes is None else bucket_bytes
  buckets: list[tuple[int, ...]] = []
  bucket: list[int] = []
  nbytes = 0
  for i in order:
    bucket.append(i)
    nbytes += core.tree_bytes(leaves[i])
    if nbytes >= threshold:
      buckets.append(tuple(bucket))
      bucket, nbytes = [], 0
  if bucket:
    buckets.append(tuple(bucket))
  ends = [0.0, *(ready[bucket[-1]] for bucket in buckets)]
  compute_s = perfmodel.predict_seconds(step_cost.gradient, device)
  gaps = [b - a for a, b in zip(ends, [*ends[1:], compute_s], strict=True)]
  gaps[-1] = max(gaps[-1], 0.0)
  tail_s = perfmodel.predict_seconds(step_cost.update, device) + device.call_s
  return BucketSchedule(tuple(buckets), tuple(gaps), tail_s)
