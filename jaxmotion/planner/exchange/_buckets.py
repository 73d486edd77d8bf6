"""How gradients travel, and when they are there."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax

from jaxmotion.core import tree_bytes
from jaxmotion.perfmodel import (
  Platform,
  StepCost,
  predict_ready_seconds,
  predict_seconds,
)


@dataclasses.dataclass(frozen=True)
class Route:
  """How gradients travel, whatever their codecs.

  Attributes:
    platform: devices and links.
    axis: of the workers, or of the hosts.
    local_axis: the axis of the devices of one host, if they reduce first.
    bucket_bytes: of gradients that travel together, at least; None for all.
    overlap: whether links and devices work at once.
    algorithm: of the collectives.
  """

  platform: Platform
  axis: str
  local_axis: str | None = None
  bucket_bytes: int | None = None
  overlap: bool = True
  algorithm: str = "ring"


class Timeline(NamedTuple):
  """When gradients are there.

  Attributes:
    buckets: positions of the tensors that travel together, first ones first.
    gaps: seconds of computing before each bucket is there, and after the last.
    tail_s: of the update and the call.
  """

  buckets: tuple[tuple[int, ...], ...]
  gaps: tuple[float, ...]
  tail_s: float


def timeline(work: StepCost, route: Route) -> Timeline:
  """Puts tensors into buckets, as `perfmodel.predict_step` does."""
  device = route.platform.device
  ready = predict_ready_seconds(work.gradient, device)[1:]
  leaves = jax.tree.leaves(work.params)
  order = sorted(range(len(leaves)), key=lambda i: ready[i])
  most = math.inf if route.bucket_bytes is None else route.bucket_bytes
  buckets: list[tuple[int, ...]] = []
  full: list[int] = []
  nbytes = 0
  for i in order:
    full.append(i)
    nbytes += tree_bytes(leaves[i])
    if nbytes >= most:
      buckets.append(tuple(full))
      full, nbytes = [], 0
  if full:
    buckets.append(tuple(full))
  ends = [0.0, *(ready[bucket[-1]] for bucket in buckets)]
  compute = predict_seconds(work.gradient, device)
  gaps = [b - a for a, b in zip(ends, [*ends[1:], compute], strict=True)]
  gaps[-1] = max(gaps[-1], 0.0)
  tail = predict_seconds(work.update, device) + device.call_s
  return Timeline(tuple(buckets), tuple(gaps), tail)
