"""Which offers for several residuals go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmotion.planner.residuals._costs import KeepOption

# More are thinned out.
_MOST = 128
_COSTS = ("nbytes", "seconds", "put_s", "fetch_s")


class ParetoFront:
  """Ways to keep some residuals, none better than another in everything.

  Args:
    *offers: for residuals of one name; none: for no residuals.

  Attributes:
    nbytes: that stay on the device.
    seconds: of everything but the link.
    put_s: of the link to the host.
    fetch_s: of the way back.
    picks: for each way the offer that is taken for each name.
  """

  def __init__(self, *offers: KeepOption):
    count = max(1, len(offers))
    columns = [o[1:] for o in offers] or [(0, 0.0, 0.0, 0.0)]
    nbytes, seconds, put_s, fetch_s = zip(*columns, strict=True)
    self.nbytes = np.array(nbytes, np.int64)
    self.seconds = np.array(seconds, float)
    self.put_s, self.fetch_s = np.array(put_s, float), np.array(fetch_s, float)
    own = min(1, len(offers))
    self.picks = np.arange(count, dtype=np.int8).reshape(count, 1)[:, :own]

  def with_one_of(self, offers: Sequence[KeepOption]) -> ParetoFront:
    """One more residual."""
    return self.and_one_of(ParetoFront(*offers))

  def and_one_of(self, other: ParetoFront) -> ParetoFront:
    """All pairs, without those that are worse than another."""
    pairs = ParetoFront()
    for name in _COSTS:
      both = getattr(self, name)[:, None] + getattr(other, name)
      setattr(pairs, name, both.reshape(-1))
    n, k = len(self.nbytes), len(other.nbytes)
    first = np.repeat(self.picks, k, axis=0)
    second = np.tile(other.picks, (n, 1))
    pairs.picks = np.concatenate([first, second], axis=1)
    return pairs.undominated()

  def undominated(self) -> ParetoFront:
    """Those that none is better than; of too many, some."""
    order = np.lexsort((self.fetch_s, self.put_s, self.seconds, self.nbytes))
    kept = self._take(order)
    better = kept._better()
    some = np.linspace(0, len(better) - 1, min(_MOST, len(better)))
    return kept._take(better[some.astype(int)])

  def _better(self) -> NDArray[Any]:
    """Places of those that none before is as good as."""
    if not self.put_s.any():
      least = np.minimum.accumulate(self.seconds)
      before = np.concatenate([[np.inf], least[:-1]])
      return np.flatnonzero(self.seconds < before)
    costs = np.stack([self.seconds, self.put_s, self.fetch_s], axis=1)
    found: list[int] = []
    for i, cost in enumerate(costs):
      if not np.any(np.all(costs[found] <= cost, axis=1)):
        found.append(i)
    return np.array(found)

  def _take(self, places: NDArray[Any]) -> ParetoFront:
    taken = ParetoFront()
    for name in (*_COSTS, "picks"):
      setattr(taken, name, getattr(self, name)[places])
    return taken
