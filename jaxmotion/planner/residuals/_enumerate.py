"""Enumerates candidate plans: what to recompute, and how to keep the rest.

Costs of keeping residuals add up, so for one set of recomputed residuals the
Pareto front of (seconds, bytes) is combined residual by residual. What
recomputation costs does not add up: two recomputed residuals may share their
way back to a saved one, and XLA fuses what it recomputes into other kernels.
Each set is therefore traced, which takes about a second for a large function,
and at most `_MAX_TRACES` sets are tried:

* all sets of layers and residuals, if these are few;
* otherwise greedily growing ones. A layer recomputed as a whole is tried
  first, because parts of it may save nothing: their recomputation needs other
  residuals in their place;
* at last the set of everything, which saves most.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from jaxmotion.memory.residuals import Action, Residual
from jaxmotion.planner.residuals._costs import (
  KeepOption,
  RecomputeSet,
  ResidualCosts,
  TracedVariant,
  is_recomputed,
)
from jaxmotion.planner.residuals._layers import layer_of, layer_pattern
from jaxmotion.planner.residuals._pareto import ParetoFront

# Variants of the function that are traced at most; a large one takes about a
# second.
_MAX_TRACES = 32


class PlanCandidate(NamedTuple):
  """A plan whose costs are sums over its residuals, not yet checked.

  Attributes:
    step_s: predicted seconds of a step.
    residual_bytes: bytes of residuals on the device.
    recomputed: patterns of the names of recomputed residuals.
    actions: (name, action) of each residual that is not kept unchanged.
  """

  step_s: float
  residual_bytes: int
  recomputed: RecomputeSet
  actions: tuple[tuple[str, Action], ...]


class PlanCandidates(NamedTuple):
  """Pareto fronts of candidates, the fastest first.

  Attributes:
    front: front of all candidates.
    by_set: front of the candidates of each set of recomputed residuals.
  """

  front: list[PlanCandidate]
  by_set: list[list[PlanCandidate]]


def list_candidates(
  costs: ResidualCosts, may_recompute: bool
) -> PlanCandidates:
  """Returns the candidates to choose from.

  Args:
    costs: costs of the function's residuals.
    may_recompute: whether residuals may be recomputed.
  """
  sets: list[RecomputeSet] = [frozenset()]
  if may_recompute:
    sets += _list_recompute_sets(costs)
  found = [_list_kept(costs, recomputed) for recomputed in dict.fromkeys(sets)]
  fronts = [_pareto_front(candidates) for candidates in found]
  return PlanCandidates(_pareto_front(itertools.chain(*found)), fronts)


def _pareto_front(
  candidates: Iterator[PlanCandidate] | Sequence[PlanCandidate],
) -> list[PlanCandidate]:
  """Returns the candidates that no other is both faster and smaller than."""
  front: list[PlanCandidate] = []
  for candidate in sorted(
    candidates, key=lambda c: (c.step_s, c.residual_bytes)
  ):
    if not front or candidate.residual_bytes < front[-1].residual_bytes:
      front.append(candidate)
  return front


def _list_recompute_sets(costs: ResidualCosts) -> Iterator[RecomputeSet]:
  """Yields the sets to try; the last one is everything."""
  base = costs.trace_variant()
  everything = frozenset(
    layer_pattern(x) for x in _list_prefixes(base.residuals)
  )
  # What is adjustable even if everything is recomputed is an input: it cannot
  # be recomputed.
  inputs = costs.trace_variant(everything).adjustable
  names = {
    r.name: r for r in base.residuals if r.name in base.adjustable - inputs
  }
  rows = list(names.values())
  units = [
    *(layer_pattern(prefix) for prefix in _list_prefixes(rows)),
    *map(_name_pattern, names),
  ]
  if 2 ** len(units) <= _MAX_TRACES:
    for count in range(1, len(units) + 1):
      yield from map(frozenset, itertools.combinations(units, count))
  else:
    yield from _grow_greedily(costs, _list_units(rows))
  yield everything


def _list_prefixes(residuals: Sequence[Residual]) -> list[str]:
  return sorted({layer_of(r.name) for r in residuals})


def _name_pattern(name: str) -> str:
  return f"^{re.escape(name)}$"


def _list_units(
  residuals: Sequence[Residual],
) -> dict[RecomputeSet, list[str]]:
  """Returns what is tried as one: layers, similar residuals, single ones.

  Residuals are similar if their names differ only in numbers and they have
  one shape and dtype. Single ones are ordered by their bytes, largest first.

  Returns:
    For each unit the names that it recomputes. At most `_MAX_TRACES // 2`
    units, so that as many traces are left for combinations.
  """
  units: dict[RecomputeSet, list[str]] = {}
  similar: dict[tuple[object, ...], list[str]] = {}
  for residual in residuals:
    layer = frozenset([layer_pattern(layer_of(residual.name))])
    units.setdefault(layer, []).append(residual.name)
    stem = re.sub(r"[_\d]+$", "", residual.name)
    key = (stem, residual.shape, str(residual.dtype))
    similar.setdefault(key, []).append(residual.name)
  for names in similar.values():
    units.setdefault(frozenset(map(_name_pattern, names)), names)
  for residual in sorted(residuals, key=lambda r: -r.encoded_bytes * r.repeats):
    name = residual.name
    units.setdefault(frozenset([_name_pattern(name)]), [name])
  return dict(itertools.islice(units.items(), _MAX_TRACES // 2))


def _grow_greedily(
  costs: ResidualCosts, units: dict[RecomputeSet, list[str]]
) -> Iterator[RecomputeSet]:
  """Repeatedly adds the unit of the fewest seconds per byte saved.

  Lazy greedy search: a unit is queued by its price when it was last traced,
  and traced again only when it comes first. That is exact while prices do not
  fall as units are added; a unit whose price falls is taken late. Units that
  were never traced come first.
  """
  chosen: RecomputeSet = frozenset()
  queue = [(-1.0, i, unit) for i, unit in enumerate(units)]
  while queue and costs.trace_count < _MAX_TRACES:
    _, i, unit = heapq.heappop(queue)
    if all(is_recomputed(name, chosen) for name in units[unit]):
      continue
    yield (tried := chosen | unit)
    price = _seconds_per_byte(
      costs.trace_variant(chosen), costs.trace_variant(tried)
    )
    if price is None:
      continue
    if queue and price > queue[0][0]:
      heapq.heappush(queue, (price, i, unit))
    else:
      chosen = tried


def _seconds_per_byte(old: TracedVariant, new: TracedVariant) -> float | None:
  """Returns the seconds added for each byte saved; None if none is saved."""
  saved = old.residual_bytes - new.residual_bytes
  return max(new.step_s - old.step_s, 0.0) / saved if saved > 0 else None


def _list_kept(
  costs: ResidualCosts, recomputed: RecomputeSet
) -> list[PlanCandidate]:
  """Returns the front of the ways to keep what is not recomputed.

  Transfers of one layer share the time of that layer to hide in. Their seconds
  are therefore separate costs within a layer, and become exposed seconds once
  the layer's front is complete.
  """
  variant = costs.trace_variant(recomputed)
  fixed = [r for r in variant.residuals if r.name not in variant.adjustable]
  front = ParetoFront()
  front.device_bytes += costs.sum_costs(fixed).device_bytes
  front.device_s += variant.step_s
  names: list[str] = []
  options: list[list[KeepOption]] = []
  for prefix in _list_prefixes(variant.residuals):
    layer = ParetoFront()
    own = [r for r in variant.residuals if layer_of(r.name) == prefix]
    adjustable = (r.name for r in own if r.name in variant.adjustable)
    for name in dict.fromkeys(adjustable):
      options.append(costs.list_options([r for r in own if r.name == name]))
      names.append(name)
      layer = layer.combine(ParetoFront(*options[-1]))
    layer.device_s += costs.exposed_seconds(
      prefix, layer.to_host_s, layer.from_host_s
    )
    layer.to_host_s, layer.from_host_s = (
      layer.to_host_s * 0,
      layer.from_host_s * 0,
    )
    front = front.combine(layer.prune())
  return [
    PlanCandidate(
      float(step_s),
      int(nbytes),
      recomputed,
      _list_actions(names, options, choice),
    )
    for step_s, nbytes, choice in zip(
      front.device_s, front.device_bytes, front.choices, strict=True
    )
  ]


def _list_actions(
  names: Sequence[str],
  options: Sequence[Sequence[KeepOption]],
  choice: NDArray[Any],
) -> tuple[tuple[str, Action], ...]:
  """Returns (name, action) of the residuals that are not kept unchanged."""
  triples = zip(names, options, choice, strict=True)
  return tuple((name, own[i].action) for name, own, i in triples if i)
