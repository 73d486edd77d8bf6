"""Pareto front of the ways to keep several residuals.

A front has four costs: device bytes, device seconds, and seconds of the links
to and from the host. It is combined with the options of one more residual by
forming all pairs and dropping dominated ones. A pair of dominated ways is
dominated as well, because costs only add up. Nothing is lost, except that
fronts of more than `_MAX_SIZE` ways are thinned out evenly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmotion.planner.residuals import _costs

# Larger fronts are thinned out.
_MAX_SIZE = 128
_COSTS = ("device_bytes", "device_s", "to_host_s", "from_host_s")


class ParetoFront:
  """Ways to keep some residuals, none better than another in every cost.

  Args:
    *options: ways to keep the residuals of one name; none: no residuals.

  Attributes:
    device_bytes: int64[ways], bytes that stay on the device.
    device_s: float64[ways], seconds of everything but the links.
    to_host_s: float64[ways], seconds of the link to the host.
    from_host_s: float64[ways], seconds of the link back.
    choices: int8[ways, names], the option taken for each name.
  """

  def __init__(self, *options: _costs.KeepOption):
    count = max(1, len(options))
    columns = [o[1:] for o in options] or [(0, 0.0, 0.0, 0.0)]
    device_bytes, device_s, to_host_s, from_host_s = zip(*columns, strict=True)
    self.device_bytes = np.array(device_bytes, np.int64)
    self.device_s = np.array(device_s, float)
    self.to_host_s = np.array(to_host_s, float)
    self.from_host_s = np.array(from_host_s, float)
    names = min(1, len(options))
    self.choices = np.arange(count, dtype=np.int8).reshape(count, 1)[:, :names]

  def combine(self, other: ParetoFront) -> ParetoFront:
    """Returns the front of all pairs of a way of this and one of another."""
    pairs = ParetoFront()
    for name in _COSTS:
      sums = getattr(self, name)[:, None] + getattr(other, name)
      setattr(pairs, name, sums.reshape(-1))
    first = np.repeat(self.choices, len(other.device_bytes), axis=0)
    second = np.tile(other.choices, (len(self.device_bytes), 1))
    pairs.choices = np.concatenate([first, second], axis=1)
    return pairs.prune()

  def prune(self) -> ParetoFront:
    """Returns the ways that no other dominates; of too many, some."""
    ordered = self._select_ways(
      np.lexsort(
        (self.from_host_s, self.to_host_s, self.device_s, self.device_bytes)
      )
    )
    front = ordered._undominated_positions()
    some = np.linspace(0, len(front) - 1, min(_MAX_SIZE, len(front)))
    return ordered._select_ways(front[some.astype(int)])

  def _undominated_positions(self) -> NDArray[Any]:
    """Returns positions of undominated ways, of ways ordered by bytes."""
    # A way is dominated if one before it, which has no more bytes, costs no
    # more seconds of any kind.
    if not self.to_host_s.any():
      # One cost besides bytes: a running minimum instead of all pairs.
      least = np.minimum.accumulate(self.device_s)
      before = np.concatenate([[np.inf], least[:-1]])
      return np.flatnonzero(self.device_s < before)
    costs = np.stack([self.device_s, self.to_host_s, self.from_host_s], axis=1)
    front: list[int] = []
    for i, cost in enumerate(costs):
      if not np.any(np.all(costs[front] <= cost, axis=1)):
        front.append(i)
    return np.array(front)

  def _select_ways(self, positions: NDArray[Any]) -> ParetoFront:
    selected = ParetoFront()
    for name in (*_COSTS, "choices"):
      setattr(selected, name, getattr(self, name)[positions])
    return selected
