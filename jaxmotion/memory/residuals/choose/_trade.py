"""Trades the bytes of saved values for the seconds of recomputing others."""

import bisect
import copy
import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from typing import NamedTuple

from jaxmotion import core, perfmodel, program
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import (
  _min_cut,
  _residual,
  _separators,
  _subsets,
)
from jaxmotion.perfmodel.extend import operation_seconds
from jaxmotion.program import Step, Value

# Cost of saving a value that is to be recomputed: more than all residuals
# together, less than an edge that cannot be cut, so that an argument that is
# the only source is saved all the same.
_RECOMPUTE_COST = 1 << 90
# Without a budget, the fraction of a function's time that recomputing adds.
_FREE_FRACTION = 0.01
# Cuts whose bytes differ by no more are taken to be equal.
_EQUAL_FRACTION = 0.01
# An input without a gradient is mostly a batch, and in memory anyway: it is
# saved rather than what follows from it, if that takes as many bytes: it counts
# a 16th less.
_GIVEN_DISCOUNT = 16
# All subsets of so many values are priced between two cuts.
_MOST_VALUES = 10
# Masks are light if all of them take so many times fewer bytes than the largest
# array that they compare: two masks of float32. Of seven blocks in a row, saved
# masks let XLA recompute all blocks at once.
_LIGHT = 16
# Seconds that a byte may cost, in steps of a factor of 1.5.
_PRICES = tuple(1e-15 * 1.5**i for i in range(40))


def _find_first(count: int, holds: Callable[[int], bool]) -> int:
  """Returns the first number below `count` from which on a condition holds."""
  return bisect.bisect_left(range(count), True, key=holds)


class Cut(NamedTuple):
  """Values that a forward pass saves, and what that costs."""

  saved: list[Value]
  rerun: list[Step]  # What the backward pass runs again.
  nbytes: int  # Encoded; fewer for inputs that are in memory anyway.
  seconds: float  # Of saving values and of recomputing the others.
  separators: AbstractSet[Value]  # Those of `saved` that split what runs again.


class Trade:
  """Choice of what to save, by minimum cuts over seconds and bytes.

  Saving a value takes the time to write and read it. Recomputing it takes the
  time of the steps in between. A price of a byte, in seconds, makes both
  comparable with memory. At price 0 the cut is the fastest, and a higher price
  never saves more bytes.
  """

  def __init__(
    self,
    joint: trace.JointProgram,
    live: frozenset[Value],
    table: _residual.ResidualTable,
    device: perfmodel.Device,
    reruns_loops: bool = False,
  ):
    # live: inputs that stay in memory anyway; reruns_loops: whether a loop may
    # run again as a whole.
    self._live, self._table = live, table
    self._reruns_loops, self._saves_loops = reruns_loops, True
    self._move_s = 1 / device.memory_rate.bytes_per_s
    self._seconds = {
      id(step): operation_seconds(step, device) for step in joint.program.steps
    }
    known_s = [s for s in self._seconds.values() if math.isfinite(s)]
    self._free_s = _FREE_FRACTION * math.fsum(known_s)
    self._keeps_flows = False
    self._begin(joint)

  def _begin(self, joint: trace.JointProgram) -> None:
    """Starts over, without cuts, for a program with other gradients."""
    self._joint = joint
    self.reads = _min_cut.values_read_by_backward(joint, self._live)
    pairs = zip(joint.inputs, joint.gradients, strict=True)
    self._given = {v for v, g in pairs if g is None and core.is_inexact(v.aval)}
    for name in ("_graph", "_free", "_smallest", "_single", "_without_loops"):
      vars(self).pop(name, None)
    self._separators = _separators.Separators(
      joint, self.reads, self._live, self._table
    )
    self._flows: dict[tuple[int, int], _min_cut.Flow] = {}
    self._cuts: dict[tuple[int, int], Cut] = {}
    self._subsets: dict[int, list[_subsets.Subset]] = {}
    self._completed: dict[tuple[Value, ...], Cut | None] = {}

  def with_joint(self, joint: trace.JointProgram) -> "Trade":
    """Returns the choice for the same program with other gradients."""
    other = copy.copy(self)
    other._begin(joint)
    return other

  def keep_flows(self, keep: bool) -> None:
    """Says whether to hold flows, from which other budgets' cuts start."""
    self._keeps_flows = keep
    if not keep:
      self._flows.clear()
      vars(self).pop("_graph", None)

  def choose_cut(self, budget: float | None) -> Cut:
    """Chooses the values to save."""
    # Without a budget, the cut of the fewest bytes that takes at most 1 % of
    # the function's own time more than the fastest one. With a budget, the
    # fastest cut whose bytes are at most that fraction of the fastest one's.
    # Separators are for budgets: without one, what runs again are short parts.
    self._separators.is_used = budget is not None
    cut = self._free if budget is None else self._choose_cut(budget)
    self.keep_flows(self._keeps_flows)
    return cut

  @functools.cached_property
  def _free(self) -> Cut:
    """The choice without a budget."""
    cut = self._choose_free(self._cut_at(-1).seconds + self._free_s)
    masks = self._light_masks(cut)
    return self._price([*cut.saved, *masks]) if masks else cut

  def _light_masks(self, cut: Cut) -> list[Value]:
    """Returns masks that would be computed again from products, if small."""
    # The backward pass begins with the mask of a sum. To compute it again, all
    # products that are added must be in memory at once, beside the cotangent.
    # Saved, the mask lets it compute them again one after the other. A loop
    # saves one mask an iteration, and has the products of one iteration in
    # memory. So masks are saved only where all of them together are small.
    steps = list(self._find_comparisons(cut))
    masks = [v for step in steps for v in step.outs]
    most = max((v.nbytes for s in steps for v in s.reads), default=0)
    nbytes = sum(self._table.describe(v).encoded_bytes for v in masks)
    is_light = _LIGHT * self._table.repeats * nbytes <= most
    return masks if is_light else []

  def _find_comparisons(self, cut: Cut) -> Iterator[Step]:
    """Yields steps that run again and compare products of rounded residuals."""
    rounded = self._find_rounded(cut)
    behind: set[Value] = set()
    for step in cut.rerun:
      reads_rounded = not rounded.isdisjoint(step.reads)
      if not behind.isdisjoint(step.reads) or (
        reads_rounded and trace.is_product(step)
      ):
        behind.update(step.outs)
        if (
          program.is_discontinuous(step.eqn) and step.outs[0].aval.dtype == bool
        ):
          yield step
      elif reads_rounded:
        rounded.update(step.outs)

  def _find_discontinuous(self, cut: Cut) -> Iterator[Value]:
    """Yields results of discontinuous steps rerun on rounded residuals."""
    # A ReLU mask recomputed from operands rounded to 8 bits would lose the 1 %
    # of them that are rounded to zero. Where an expensive step, a convolution
    # say, is rerun between the rounded residual and the comparison, its results
    # are seldom exactly zero, and the mask may be recomputed.
    joint, rounded = self._joint, self._find_rounded(cut)
    known = {*cut.saved, *self._live, *joint.program.constants}
    for step in cut.rerun:
      if program.is_discontinuous(step.eqn):
        before = joint.order.leading_to(step.reads, known)
        used = {v for s in (*before, step) for v in s.reads}
        if used & rounded and not any(
          program.is_expensive(s.eqn) for s in before
        ):
          yield from step.outs

  def _find_rounded(self, cut: Cut) -> set[Value]:
    """Returns the saved values that a codec rounds."""
    return {v for v in cut.saved if self._table.describe(v).is_lossy}

  def _choose_cut(self, budget: float) -> Cut:
    """Returns the fastest cut within a fraction of the fastest one's bytes."""
    if budget == 0:
      return self._smallest
    if budget == math.inf:
      return self._single
    most_bytes = self._cut_at(-1).nbytes * budget
    cut = self._choose_small(most_bytes)
    if (others := self._without_loops) is not None:
      # The time that a loop takes may be worth more bytes than all matmuls'.
      # A price then saves the loop or nothing, and in between lies the cut
      # that runs the loop again and saves results of matmuls.
      other = others._choose_small(most_bytes)
      if other.nbytes <= most_bytes and other.seconds < cut.seconds:
        return other
    return cut

  @functools.cached_property
  def _without_loops(self) -> "Trade | None":
    """The choice that saves no result of a loop; None if no loop may rerun."""
    steps = self._joint.program.steps
    may_rerun = self._reruns_loops and any(s.name == "scan" for s in steps)
    if not (may_rerun and self._saves_loops):
      return None
    other = copy.copy(self)
    other._saves_loops = False
    other._begin(self._joint)
    return other

  def _choose_free(self, most_s: float) -> Cut:
    """Returns the cut of the fewest bytes that takes at most some seconds."""
    first = _find_first(
      len(_PRICES), lambda i: self._cut_at(i).seconds > most_s
    )
    # Equal layers have equal prices, so neighboring cuts may differ by one
    # value of every layer. In between lie the cuts that save some of them.
    if first == len(_PRICES) or not self._between(first):
      return self._cut_at(first - 1)
    most = len(self._between(first))
    count = _find_first(
      most + 1, lambda n: self._cut_at(first, n).seconds <= most_s
    )
    return self._cut_at(first, min(count, most))

  def _choose_small(self, most_bytes: float) -> Cut:
    """Returns the fastest cut of at most some bytes, else the smallest one."""
    if self._cut_at(-1).nbytes <= most_bytes:
      return self._cut_at(-1)
    first = self._find_price(most_bytes)
    if first == len(_PRICES):
      return self._smallest
    count = _find_first(
      len(self._between(first)) + 1,
      lambda n: self._cut_at(first, n).nbytes > most_bytes,
    )
    priced = self._cut_at(first, count - 1)
    # A faster cut of no more bytes may lie between two cuts.
    for subset in reversed(self._find_subsets(first)):
      is_within = subset.nbytes <= most_bytes
      if is_within and subset.seconds < priced.seconds:
        if (cut := self._complete(subset.saved)) is not None:
          return cut
    return priced

  def _find_price(self, most_bytes: float) -> int:
    """Returns the index of the lowest price whose cut has no more bytes."""
    return _find_first(
      len(_PRICES), lambda i: self._cut_at(i).nbytes <= most_bytes
    )

  def _find_subsets(self, index: int) -> list[_subsets.Subset]:
    """Returns the best subsets of what the cuts around a price save."""
    # Small values are in all of them: they matter little, and may be many.
    if index not in self._subsets:
      cuts = self._cut_at(index), self._cut_at(index - 1)
      saved = self._separators.sort_values(v for c in cuts for v in c.saved)
      must_save = {*self._joint.inputs}.union(*(cut.separators for cut in cuts))
      large = heapq.nlargest(
        _MOST_VALUES,
        (v for v in saved if v not in must_save),
        self._count_bytes,
      )
      may_rerun = {*self._graph.graph.steps}
      candidates = [
        _subsets.Candidate(
          v, self._count_bytes(v), self._save_seconds(v), v in large
        )
        for v in saved
      ]
      self._subsets[index] = _subsets.find_subsets(
        self._joint,
        self.reads,
        {*self._live, *self._joint.program.constants},
        candidates,
        lambda s: self._rerun_seconds(s) if s in may_rerun else math.inf,
      )
    return self._subsets[index]

  def _complete(self, saved: list[Value]) -> Cut | None:
    """Returns the cut that saves these values; None if masks would change."""
    if (key := tuple(saved)) not in self._completed:
      cut = self._price(saved)
      changes = any(True for _ in self._find_discontinuous(cut))
      self._completed[key] = None if changes else cut
    return self._completed[key]

  @functools.cached_property
  def _smallest(self) -> Cut:
    """The fastest cut of nearly the fewest bytes."""
    # One byte costs more than all steps together. What a few bytes spare is not
    # computed again: the sums of a norm are as many times smaller than what
    # they are computed from as that has channels.
    cut, _ = self._find_cut(self._make_graph(may_rerun_unknown=True), 1.0)
    most_bytes = (1 + _EQUAL_FRACTION) * cut.nbytes
    near = self._cut_at(min(self._find_price(most_bytes), len(_PRICES) - 1))
    if near.nbytes <= most_bytes and near.seconds < cut.seconds:
      cut = near
    return self._price(self._separators.add_last(cut.saved))

  @functools.cached_property
  def _single(self) -> Cut:
    """The fastest cut that runs no matmul, convolution or the like again."""
    return self._find_cut(self._make_graph(may_rerun_products=False), 0.0)[0]

  @functools.cached_property
  def _graph(self) -> _min_cut.PricedGraph:
    return self._make_graph()

  def _between(self, index: int) -> list[Value]:
    """Returns what the next lower price saves beside the cut at a price."""
    fewer = set(self._cut_at(index).saved)
    return [v for v in self._cut_at(index - 1).saved if v not in fewer]

  def _cut_at(self, index: int, count: int = 0) -> Cut:
    """Returns the cheapest cut at a price of a byte."""
    # count: values of `_between` that must be saved.
    if (index, count) not in self._cuts:
      must_save: Sequence[Value] = ()
      if count:
        must_save = self._between(index)
        if count == len(must_save):
          return self._cut_at(index - 1)
        must_save = must_save[:count]
      price_s = _PRICES[index] if index >= 0 else 0.0
      # Costs grow with the price, and with what must be saved.
      before = [
        key
        for key in self._flows
        if key <= (index, count) and (key[1] == 0 or key[0] == index)
      ]
      start = self._flows[max(before)] if before else None
      self._cuts[index, count], self._flows[index, count] = self._find_cut(
        self._graph, price_s, must_save, start
      )
    return self._cuts[index, count]

  def _find_cut(
    self,
    graph: _min_cut.PricedGraph,
    byte_s: float,
    must_save: Sequence[Value] = (),
    start: _min_cut.Flow | None = None,
  ) -> tuple[Cut, _min_cut.Flow]:
    """Finds the cheapest cut at a price of a byte."""
    # The backward pass must not rerun a step that compares floats for equality.
    # It reruns a loop only in the body of another one: all residuals of a loop
    # that runs again are in memory together, which gains nothing where they are
    # nearly all that there are. It must neither rerun a discontinuous step on
    # rounded operands, but which operands are rounded is known only after the
    # cut. So the cut is repeated with the results of such steps added to
    # `must_keep`, which only grows, until there are no new ones.
    # byte_s: seconds that a byte may cost.
    # Returns the cut, and the flow of the first search for it.
    must_keep = set(must_save)
    save_costs = graph.save_costs(byte_s)
    first: _min_cut.Flow | None = None
    while True:
      rerun_costs = graph.rerun_costs(must_keep)
      saved, start = graph.graph.find_cut(save_costs, rerun_costs, start)
      first = start if first is None else first
      together = self._separators.add_to(saved)
      cut = self._price(together, {*together} - {*saved})
      new = {*self._find_discontinuous(cut)} - must_keep
      if not new:
        return cut, first
      must_keep |= new

  def _make_graph(
    self, *, may_rerun_unknown: bool = False, may_rerun_products: bool = True
  ) -> _min_cut.PricedGraph:
    """Returns the graph of all cuts."""
    # may_rerun_unknown: whether steps may run again whose seconds nobody knows.
    describe = self._table.describe

    def must_save(step: Step) -> bool:
      """Says whether the backward pass must not run a step again."""
      residuals = [describe(v) for v in step.outs]
      if any(r.recomputed for r in residuals):
        return False
      seconds = self._seconds[id(step)]
      is_rerun = may_rerun_unknown and step.name != "scan"
      # A name is given to a value by a step that copies nothing: what is kept
      # is the value.
      return (
        (step.name != "name" and any(r.kept for r in residuals))
        or (math.isinf(seconds) and not is_rerun)
        or (step.name == "scan" and not self._reruns_loops)
        or (not may_rerun_products and trace.is_product(step))
        or program.is_float_equality(step.eqn)
      )

    graph = _min_cut.CutGraph(self._joint, self.reads, self._live, must_save)
    rerun_costs: list[int] = []
    maker: dict[Value, int] = {}
    for i, step in enumerate(graph.steps):
      if any(describe(v).recomputed for v in step.outs):
        rerun_costs.append(0)
      else:
        rerun_costs.append(
          int(_min_cut.UNITS_PER_S * self._rerun_seconds(step))
        )
        maker.update(dict.fromkeys(step.outs, i))
    savings = [self._price_saving(v) for v in graph.values]
    return _min_cut.PricedGraph(graph, savings, rerun_costs, maker)

  def _price_saving(self, value: Value) -> _min_cut.Saving:
    """Returns what saving a value costs, at any price of a byte."""
    if not hasattr(value.aval, "shape"):
      return _min_cut.Saving(1, 0, 0.0)  # An abstract token.
    maker = self._joint.order.maker(value)
    is_of_loop = maker is not None and maker.name == "scan"
    is_rerun = self._table.describe(value).recomputed or (
      is_of_loop and not self._saves_loops
    )
    return _min_cut.Saving(
      _RECOMPUTE_COST if is_rerun else None,
      self._count_bytes(value),
      self._save_seconds(value),
    )

  def _price(
    self, saved: list[Value], separators: AbstractSet[Value] = frozenset()
  ) -> Cut:
    """Returns the cut that saves some values."""
    joint = self._joint
    known = {*saved, *self._live, *joint.program.constants}
    rerun = joint.order.leading_to(self.reads, known)
    seconds = [*map(self._rerun_seconds, rerun)]
    seconds += map(self._save_seconds, saved)
    nbytes = sum(map(self._count_bytes, saved))
    return Cut(saved, rerun, nbytes, math.fsum(seconds), separators)

  def _rerun_seconds(self, step: Step) -> float:
    """Returns the seconds of a step, 0 where nobody knows them."""
    seconds = self._seconds[id(step)]
    return seconds if math.isfinite(seconds) else 0.0

  def _count_bytes(self, value: Value) -> int:
    """Returns the bytes of saving a value, 0 of an abstract token."""
    if not hasattr(value.aval, "shape"):
      return 0
    residual = self._table.describe(value)
    nbytes = residual.encoded_bytes
    # Of two equal choices, the one that is in memory anyway is saved.
    if value in self._given and residual.codec is None:
      nbytes -= nbytes // _GIVEN_DISCOUNT
    return nbytes

  def _save_seconds(self, value: Value) -> float:
    """Returns the seconds of writing what is saved, and of reading it."""
    # An input is in memory, but for those of a loop's body: the loop stacks
    # them.
    if not hasattr(value.aval, "shape"):
      return 0.0
    residual = self._table.describe(value)
    moved = 2 * residual.encoded_bytes
    if residual.codec is not None:  # Encoding reads the array, decoding writes.
      moved += 2 * residual.nbytes
    elif value in self._joint.inputs and self._table.repeats == 1:
      moved = residual.encoded_bytes
    return moved * self._move_s
