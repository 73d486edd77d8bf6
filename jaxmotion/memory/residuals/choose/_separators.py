"""Splits what a backward pass computes again into parts, one at a time.

A minimum cut pays for the bytes that it saves, not for what is in memory while
the rest is computed again. For the fewest bytes it saves the input of a
network of layers that are written out, and the backward pass then begins by
computing all layers again and holds the residuals of all of them at once. So
further values are saved: *separators*, such as the inputs of layers, between
which the parts are computed again one after the other.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxmotion import program
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import _min_cut, _residual
from jaxmotion.program import Step, Value

# Sizes are estimates: a split that saves a smaller fraction of the bytes is not
# taken.
_LEAST_GAIN = 0.1
# A split that only spares a product may save this fraction of all bytes more.
_WIDE = 0.2
# A program is split at no more places. Each has the smallest frontier around.
_PLACES = 128
# Each limit of memory that is tried is this fraction of the peak before.
_STEP = 0.9


class _Crossing(NamedTuple):
  """A value that steps before a place make and steps after it read."""

  position: int  # Of the step that makes it.
  nbytes: float  # Of saving it; infinity if it cannot be saved.
  cached_bytes: int  # That the backward pass would cache of it.
  value: Value


class _Place(NamedTuple):
  """A place between two steps that run again."""

  position: int  # Of the step before.
  held: int  # Bytes that all steps up to there would cache.
  saved: int  # Bytes of the values up to there that are saved anyway.
  frontier: Sequence[_Crossing]  # What crosses the place, the latest first.

  def list_new(self, place: "_Place") -> Iterator[_Crossing]:
    """Yields what crosses this place and is made after an earlier one."""
    for crossing in self.frontier:
      if crossing.position <= place.position:
        return
      yield crossing

  def count_held(self, place: "_Place") -> int:
    """Returns the bytes that are cached between an earlier place and this."""
    saved = sum(crossing.cached_bytes for crossing in self.list_new(place))
    return self.held - place.held - saved


_START = _Place(-1, 0, 0, ())


class _Split(NamedTuple):
  """Places to split at, with what is in memory."""

  places: list[_Place]  # In order.
  saved_bytes: float  # Of all saved values.
  # Most bytes, of saved and of cached values, at any time. Saved values are
  # gone once what follows from them has a gradient.
  peak_bytes: float

  def list_separators(self) -> list[Value]:
    """Returns the values to save."""
    pairs = itertools.pairwise([_START, *self.places])
    return [c.value for a, b in pairs for c in b.list_new(a)]


class Separators:
  """Choice of separators, for any set of saved values of a program."""

  def __init__(
    self,
    joint: trace.JointProgram,
    reads: Sequence[Value],
    live: Collection[Value],
    table: _residual.ResidualTable,
    is_used: bool = True,
  ):
    # is_used: whether any are added.
    self._joint, self._reads, self._table = joint, reads, table
    self._is_used = is_used
    self._known, self._read = {*live, *joint.program.constants}, {*reads}

  def add_to(self, saved: Sequence[Value]) -> list[Value]:
    """Returns saved values and the separators that reduce memory."""
    places = self._find_places(saved) if self._is_used else []
    whole = best = _find_split(places, math.inf) if places else None
    if whole is None or best is None:
      return list(saved)
    most = whole.peak_bytes
    while (split := _find_split(places, _STEP * most)) is not None:
      if self._count_bytes(split) < self._count_bytes(best):
        best = split
      most = split.peak_bytes
    before, after = self._count_bytes(whole), self._count_bytes(best)
    if after > (1 - _LEAST_GAIN) * before:
      return list(saved)
    return self._repeat_less(saved, places, best)

  def _repeat_less(
    self, saved: Sequence[Value], places: Sequence[_Place], split: _Split
  ) -> list[Value]:
    """Adds places that spare a product and take no more memory."""
    # Where a part has two layers, the output of the first one is computed
    # again.
    most = self._count_bytes(split)
    all_saved = self.sort_values([*saved, *split.list_separators()])
    links = trace.Positions(self._steps_from(all_saved))
    for place in sorted(
      places, key=lambda p: sum(c.nbytes for c in p.frontier)
    ):
      new = sum(c.nbytes for c in place.frontier if c.value not in all_saved)
      # A compiler may order a part with large saved values another way.
      if place in split.places or new > _WIDE * most:
        continue
      if not self._spares_product([c.value for c in place.frontier], links):
        continue
      more = _measure_split(
        sorted([*split.places, place], key=lambda p: p.position)
      )
      if self._count_bytes(more) <= most:
        split = more
        all_saved = self.sort_values([*saved, *split.list_separators()])
        links = trace.Positions(self._steps_from(all_saved))
    return all_saved

  def _spares_product(
    self, values: Sequence[Value], links: trace.Positions
  ) -> bool:
    """Says whether saving some values spares a product among some steps."""
    # Walks back over steps whose results nothing else reads any more.
    spared: set[int] = set()
    todo = list(values)
    while todo:
      index = links.maker.get(todo.pop())
      if index is None or index in spared:
        continue
      step = links.steps[index]
      if any(
        v in self._read or not spared.issuperset(links.readers.get(v, ()))
        for v in step.outs
        if v not in values
      ):
        continue
      if trace.is_product(step) and step.name not in program.RANDOM:
        return True
      spared.add(index)
      todo += step.reads
    return False

  def _count_bytes(self, split: _Split) -> float:
    """Returns the bytes that are in memory at most, in one of all repeats."""
    return (self._table.repeats - 1) * split.saved_bytes + split.peak_bytes

  def sort_values(self, values: Iterable[Value]) -> list[Value]:
    """Returns values in the order in which they are computed, each once."""
    return sorted(dict.fromkeys(values), key=self._position.__getitem__)

  def add_last(self, saved: Sequence[Value]) -> list[Value]:
    """Returns saved values, and what the gradient of a loss reads first."""
    # The backward pass of a loss follows at once: the output of the last layer
    # is gone before that layer is computed again. To compute it again, too,
    # would take time and save nothing.
    return self.sort_values([*saved, *self._find_last(saved)])

  def _find_last(self, saved: Sequence[Value]) -> list[Value]:
    """Returns what the backward pass of a loss reads first and not again."""
    joint = self._joint
    is_loss = all(math.prod(v.aval.shape) == 1 for v in joint.cotangents)
    if self._table.repeats > 1 or not is_loss:
      return []
    steps = self._steps_from(saved)
    far = _find_far(steps)
    # Of each backward step that reads any: the far values that it reads.
    far_reads = [
      own
      for step in joint.backward_steps()
      if (own := [v for v in dict.fromkeys(step.reads) if v in far])
    ]
    first = far_reads[0] if far_reads else []
    later = itertools.dropwhile(lambda own: {*own} <= {*first}, far_reads)
    if any(v in first for own in later for v in own):
      return []
    residuals = [self._table.describe(v) for v in first]
    # From rounded values, masks would be computed again.
    if any(r.recomputed or r.codec is not None for r in residuals):
      return []
    before, after = (
      sum(program.is_expensive(step.eqn) for step in some)
      for some in (steps, self._steps_from([*saved, *first]))
    )
    return first if after < before else []

  @functools.cached_property
  def _cached_bytes(self) -> dict[Value, int]:
    """Bytes of what would be cached if everything ran again."""
    cached = _min_cut.choose_cached(
      self._joint, self._reads, self._known, self._table
    )
    return {v: r.encoded_bytes for v, r in cached.items()}

  @functools.cached_property
  def _position(self) -> dict[Value, int]:
    """Position of each value in the order in which they are computed."""
    joint = self._joint
    computed = (v for step in joint.program.steps for v in step.outs)
    return {v: i for i, v in enumerate((*joint.inputs, *computed))}

  def _steps_from(self, saved: Iterable[Value]) -> list[Step]:
    """Returns the steps that the backward pass reruns from saved values."""
    known = {*saved, *self._known}
    return self._joint.order.leading_to(self._reads, known)

  def _find_places(self, saved: Sequence[Value]) -> list[_Place]:
    """Finds the places where the steps that run again may be split."""
    steps = self._steps_from(saved)
    made_at = _find_far(steps)
    last_read = {
      v: i for i, s in enumerate(steps) for v in s.reads if v in made_at
    }
    if not last_read:
      return []
    cached = self._cached_bytes
    held_until = [0] * len(steps)
    for value, position in made_at.items():
      held_until[position] += cached.get(value, 0)
    held_until = list(itertools.accumulate(held_until))
    saved_until = self._accumulate_saved(saved, steps)
    sizes = {v: self._saved_bytes(v) for v in last_read}
    # For each bucket of equally many cached bytes, the place that the fewest
    # bytes cross. The frontier are the values that cross the present place.
    smallest: dict[int, _Place] = {}
    least_bytes: dict[int, float] = {}
    frontier: dict[Value, None] = {}
    for i, step in enumerate(steps):
      for value in step.reads:
        if last_read.get(value) == i:
          frontier.pop(value, None)
      frontier.update((v, None) for v in step.outs if last_read.get(v, i) > i)
      bucket = held_until[i] * _PLACES // (held_until[-1] + 1)
      nbytes = sum(sizes[v] for v in frontier)
      if nbytes < least_bytes.get(bucket, math.inf):
        least_bytes[bucket] = nbytes
        crossings = [
          _Crossing(made_at[v], sizes[v], cached.get(v, 0), v)
          for v in reversed(frontier)
        ]
        smallest[bucket] = _Place(i, held_until[i], saved_until[i], crossings)
    return [
      *smallest.values(),
      _Place(len(steps), held_until[-1], saved_until[-1], ()),
    ]

  def _accumulate_saved(
    self, saved: Sequence[Value], steps: Sequence[Step]
  ) -> list[int]:
    """Returns the bytes that are saved up to each step, and in all."""
    at = [self._position[s.outs[0]] if s.outs else 0 for s in steps]
    saved_at = [0] * (len(steps) + 1)
    for value in saved:
      if math.isfinite(nbytes := self._saved_bytes(value)):
        saved_at[bisect.bisect_left(at, self._position[value])] += int(nbytes)
    return list(itertools.accumulate(saved_at))

  def _saved_bytes(self, value: Value) -> float:
    """Returns the bytes of a value if it is saved, infinity if it cannot be."""
    if not hasattr(value.aval, "shape"):
      return math.inf
    residual = self._table.describe(value)
    return math.inf if residual.recomputed else residual.encoded_bytes


def _find_far(steps: Sequence[Step]) -> dict[Value, int]:
  """Returns the values that follow from expensive steps, with positions."""
  # What follows by cheap steps from what is there is not far: it is computed
  # again wherever it is read.
  far: dict[Value, int] = {}
  for i, step in enumerate(steps):
    if program.is_expensive(step.eqn) or any(v in far for v in step.reads):
      far.update(dict.fromkeys(step.outs, i))
  return far


def _find_split(places: Sequence[_Place], most_bytes: float) -> _Split | None:
  """Finds the places of the smallest frontiers for a limit of memory."""
  # A shortest path: `cost[i]` is the least that is saved if the program is
  # split at place `i`, and `before[i]` the place of the split before it.
  chain = [_START, *places]
  cost = [0.0]
  before = [0]
  for i, place in enumerate(places, 1):
    least, index = math.inf, 0
    room = most_bytes - place.saved
    longest = room + sum(c.cached_bytes for c in place.frontier)
    for j in range(i - 1, -1, -1):
      if place.held - chain[j].held > longest:
        break
      if cost[j] < least:
        total = cost[j] + sum(c.nbytes for c in place.list_new(chain[j]))
        if total < least and total + place.count_held(chain[j]) <= room:
          least, index = total, j
    cost.append(least)
    before.append(index)
  if not math.isfinite(cost[-1]):
    return None
  path = [len(places)]
  while path[-1]:
    path.append(before[path[-1]])
  return _measure_split([chain[i] for i in reversed(path[:-1])])


def _measure_split(places: list[_Place]) -> _Split:
  """Returns a split at some places, in order, with what is in memory."""
  saved, peak = 0.0, 0.0
  for before, place in itertools.pairwise([_START, *places]):
    saved += sum(c.nbytes for c in place.list_new(before))
    peak = max(peak, saved + place.saved + place.count_held(before))
  return _Split(places, saved + places[-1].saved, peak)
