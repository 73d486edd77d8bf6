"""Plans of which none is both faster and smaller than another."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from jaxmotion.memory.residuals import Action, Residual
from jaxmotion.planner.residuals._costs import (
  Drops,
  KeepOption,
  ResidualCosts,
  TracedVariant,
  dropped,
)
from jaxmotion.planner.residuals._layers import prefix_of, within
from jaxmotion.planner.residuals._pareto import ParetoFront

# Functions that are traced at most; each takes about a second if it is large.
_TRACES = 32


class PlanCandidate(NamedTuple):
  """A plan, priced part by part.

  Attributes:
    step_s: seconds of a step.
    nbytes: of residuals on the device.
    drops: what is computed again.
    picks: what is done with what is kept, by name.
  """

  step_s: float
  nbytes: int
  drops: Drops
  picks: tuple[tuple[str, Action], ...]


class PlanCandidates(NamedTuple):
  """Plans to choose from; of each list none is both faster and smaller.

  Attributes:
    all_of: the best ones, the fastest first.
    by_drops: the best ones that compute the same again.
  """

  all_of: list[PlanCandidate]
  by_drops: list[list[PlanCandidate]]


def list_candidates(prices: ResidualCosts, drop: bool) -> PlanCandidates:
  """Returns plans to choose from.

  Args:
    prices: of the function.
    drop: whether something may be computed again.
  """
  sets = [frozenset[str](), *(_drop_sets(prices) if drop else ())]
  found = [_ways_to_keep(prices, drops) for drops in dict.fromkeys(sets)]
  every = list(itertools.chain(*found))
  return PlanCandidates(_undominated(every), list(map(_undominated, found)))


def _undominated(every: Sequence[PlanCandidate]) -> list[PlanCandidate]:
  best: list[PlanCandidate] = []
  for draft in sorted(every, key=lambda d: (d.step_s, d.nbytes)):
    if not best or draft.nbytes < best[-1].nbytes:
      best.append(draft)
  return best


def _drop_sets(prices: ResidualCosts) -> Iterator[Drops]:
  """Sets of what to compute again that are worth a look; at last, all."""
  base = prices.trial()
  all_of = frozenset(within(p) for p in _prefixes(base.rows))
  # Arguments cannot be computed again.
  free = base.movable - prices.trial(all_of).movable
  names = {r.name: r for r in base.rows if r.name in free}
  layers = [within(p) for p in _prefixes(list(names.values()))]
  few = [*layers, *map(_exactly, names)]
  if 2 ** len(few) <= _TRACES:
    for count in range(1, len(few) + 1):
      yield from map(frozenset, itertools.combinations(few, count))
  else:
    yield from _greedy(prices, _units(list(names.values())))
  yield all_of


def _prefixes(rows: Sequence[Residual]) -> list[str]:
  return sorted({prefix_of(r.name) for r in rows})


def _exactly(name: str) -> str:
  return f"^{re.escape(name)}$"


def _units(rows: Sequence[Residual]) -> dict[Drops, list[str]]:
  """What is tried together: a layer, what is alike in it, one by one.

  Returns:
    The names that each drops; of many, the first.
  """
  units: dict[Drops, list[str]] = {}
  alike: dict[tuple[object, ...], list[str]] = {}
  for row in rows:
    prefix = prefix_of(row.name)
    units.setdefault(frozenset([within(prefix)]), []).append(row.name)
    stem = re.sub(r"[_\d]+$", "", row.name)
    alike.setdefault((stem, row.shape, str(row.dtype)), []).append(row.name)
  for names in alike.values():
    units.setdefault(frozenset(map(_exactly, names)), names)
  for row in sorted(rows, key=lambda r: -r.encoded_bytes * r.repeats):
    units.setdefault(frozenset([_exactly(row.name)]), [row.name])
  # The others are for those that go together.
  return dict(itertools.islice(units.items(), _TRACES // 2))


def _greedy(
  prices: ResidualCosts, units: dict[Drops, list[str]]
) -> Iterator[Drops]:
  """Drops what costs the fewest seconds a byte, again and again.

  A unit's price is looked up again only when it is the best (its place in the
  queue is what it was at its last look).
  """
  chosen: Drops = frozenset()
  queue = [(-1.0, i, unit) for i, unit in enumerate(units)]
  while queue and prices.traces < _TRACES:
    _, i, unit = heapq.heappop(queue)
    if all(dropped(name, chosen) for name in units[unit]):
      continue
    yield (tried := chosen | unit)
    price = _price(prices.trial(chosen), prices.trial(tried))
    if price is None:
      continue
    if queue and price > queue[0][0]:
      heapq.heappush(queue, (price, i, unit))
    else:
      chosen = tried


def _price(old: TracedVariant, new: TracedVariant) -> float | None:
  """Seconds for each byte less; None if there is none."""
  saved = old.nbytes - new.nbytes
  return max(new.step_s - old.step_s, 0.0) / saved if saved > 0 else None


def _ways_to_keep(prices: ResidualCosts, drops: Drops) -> list[PlanCandidate]:
  """The best plans that compute just these again."""
  trial = prices.trial(drops)
  fixed = [r for r in trial.rows if r.name not in trial.movable]
  whole = ParetoFront()
  whole.nbytes += prices.offered(fixed).device_bytes
  whole.seconds += trial.step_s
  names: list[str] = []
  offers: list[list[KeepOption]] = []
  for prefix in _prefixes(trial.rows):
    layer = ParetoFront()
    own = [r for r in trial.rows if prefix_of(r.name) == prefix]
    for name in dict.fromkeys(r.name for r in own if r.name in trial.movable):
      offers.append(prices.offers([r for r in own if r.name == name]))
      names.append(name)
      layer = layer.with_one_of(offers[-1])
    layer.seconds += prices.exposed_s(prefix, layer.put_s, layer.fetch_s)
    layer.put_s, layer.fetch_s = layer.put_s * 0, layer.fetch_s * 0
    whole = whole.and_one_of(layer.undominated())
  return [
    PlanCandidate(float(s), int(n), drops, _picked(names, offers, row))
    for s, n, row in zip(whole.seconds, whole.nbytes, whole.picks, strict=True)
  ]


def _picked(
  names: Sequence[str],
  offers: Sequence[Sequence[KeepOption]],
  row: NDArray[Any],
) -> tuple[tuple[str, Action], ...]:
  pairs = zip(names, offers, row, strict=True)
  return tuple((name, own[i].action) for name, own, i in pairs if i)
