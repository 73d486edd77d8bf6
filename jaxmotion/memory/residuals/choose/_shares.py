"""Search for the share of residuals that a budget in bytes allows."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from jaxmotion.memory.residuals.choose import _residual

# Steps of the search.
_SHARES = 32


def find_largest_share(
  estimate: Callable[[float], int], count: Callable[[float], int], most: float
) -> float | None:
  """Finds the largest share of the residuals whose bytes are in a budget."""
  # The share is guessed from estimates, since counting may cost a trace.

  def is_above(step: int) -> bool:
    return count(step / _SHARES) > most

  low, high = 0, _SHARES + 1
  guess = bisect.bisect_left(
    range(high), True, key=lambda step: estimate(step / _SHARES) > most
  )
  for step in (guess, guess - 1):
    if low <= step < high:
      low, high = (low, step) if is_above(step) else (step + 1, high)
  first = low + bisect.bisect_left(range(low, high), True, key=is_above)
  return (first - 1) / _SHARES if first else None


def count_device_bytes(residuals: Iterable[_residual.Residual]) -> int:
  """Returns the encoded bytes of all residuals on the device."""
  found = (r for r in residuals if not r.on_host)
  return sum(r.encoded_bytes * r.repeats for r in found)
