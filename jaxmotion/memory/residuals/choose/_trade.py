"""Trades the bytes of saved values for the seconds of recomputing others."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxmotion import core, perfmodel, program
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import (
  _min_cut,
  _residual,
  _separators,
  _subsets,
)
from jaxmotion.perfmodel.extend import (
  operation_seconds,
  predict_peak,
  predict_steps,
)
from jaxmotion.program import Step, Value

# Cost of saving a value that is to be recomputed: more than all residuals
# together, less than an edge that cannot be cut, so that an argument that is
# the only source is saved all the same.
_RECOMPUTE_COST = 1 << 90
# Without a budget, the fraction of a function's time that recomputing adds.
_FREE_FRACTION = 0.01
# Cuts whose bytes differ by no more are taken to be equal.
_EQUAL_FRACTION = 0.01
# Times that differ by a smaller fraction are taken to be equal: predictions are
# not finer.
_EQUAL_TIME = 0.005
_EQUAL_FLOPS = 0.001
# An array this many times smaller than another is free to keep beside it: the
# results of a loss, or the sums of a norm.
SMALL = 8
# An input without a gradient is mostly a batch, and in memory anyway: it is
# saved rather than what follows from it, if that takes as many bytes: it counts
# a 16th less.
_GIVEN_DISCOUNT = 16
# All subsets of so many large values are priced.
_MOST_VALUES = 10
# Candidates are about this share of the fastest cut's bytes apart.
_SHARES = 16
# Programs of more steps are not predicted as a whole for each candidate: that
# would take longer than to trace them.
_MOST_STEPS = 1000
# Seconds that a byte may cost, in steps of a factor of 1.5.
_PRICES = (0.0, *(1e-15 * 1.5**i for i in range(40)))


class Cut(NamedTuple):
  """Values that a forward pass saves, and what that costs."""

  saved: list[Value]
  rerun: list[Step]  # What the backward pass runs again.
  nbytes: int  # Encoded; fewer for inputs that are in memory anyway.
  seconds: float  # Of saving values and of recomputing the others.


def _sort_key(cut: Cut) -> tuple[float, float]:
  return cut.nbytes, cut.seconds


class Trade:
  """Choice of what to save, among candidates that minimum cuts give.

  Saving a value takes the time to write and read it. Recomputing it takes the
  time of the steps in between. A price of a byte, in seconds, makes both
  comparable with memory. At price 0 the cut is the fastest, and a higher price
  never saves more bytes. These cuts and sets between them are candidates.

  Costs of single steps do not say what a compiler fuses. So both passes are
  predicted as a whole for each candidate. From the fewest bytes on, a larger
  candidate counts only if it takes less time and no more FLOPs than those
  before it. So a larger budget never gives a slower step.
  """

  def __init__(
    self,
    joint: trace.JointProgram,
    live: frozenset[Value],
    table: _residual.ResidualTable,
    device: perfmodel.Device,
    reruns_loops: bool = False,
    has_budget: bool = True,
  ):
    # live: inputs that stay in memory anyway; reruns_loops: whether a loop may
    # run again as a whole; has_budget: whether budgets will be asked for.
    self._live, self._table, self._device = live, table, device
    self._reruns_loops, self._has_budget = reruns_loops, has_budget
    self._move_s = 1 / device.memory_rate.bytes_per_s
    self._seconds = {
      id(step): operation_seconds(step, device) for step in joint.program.steps
    }
    self._total_s = math.fsum(filter(math.isfinite, self._seconds.values()))
    self._begin(joint)

  def _begin(self, joint: trace.JointProgram) -> None:
    """Starts over, without cuts, for a program with other gradients."""
    self._joint = joint
    self.reads = _min_cut.values_read_by_backward(joint, self._live)
    self._known = {*self._live, *joint.program.constants}
    pairs = zip(joint.inputs, joint.gradients, strict=True)
    self._given = {v for v, g in pairs if g is None and core.is_inexact(v.aval)}
    for name, attribute in vars(type(self)).items():
      if isinstance(attribute, functools.cached_property):
        vars(self).pop(name, None)
    # Separators are for budgets: without one, what runs again are short parts.
    self._separators = _separators.Separators(
      joint, self.reads, self._live, self._table, is_used=self._has_budget
    )
    self._costs: dict[tuple[Value, ...], tuple[float, float]] = {}

  def with_joint(self, joint: trace.JointProgram) -> "Trade":
    """Returns the choice for the same program with other gradients."""
    other = copy.copy(self)
    other._begin(joint)
    return other

  def choose_cut(self, budget: float | None) -> Cut:
    """Chooses the values to save."""
    # Without a budget, the cut of the fewest bytes that takes at most 1 % more
    # time than the fastest one. With a budget, the fastest cut whose bytes are
    # at most that fraction of the fastest one's.
    if budget is None:
      return self._free
    if budget == 0:
      return self._smallest
    if budget == math.inf:
      return self._single
    return self._choose_within(self._fastest.nbytes * budget)

  @functools.cached_property
  def _fastest(self) -> Cut:
    """The cut of budget 1, whose bytes budgets are shares of."""
    return self._choose_within(math.inf)

  def _choose_within(self, most_bytes: float) -> Cut:
    """Returns the fastest cut of at most some bytes, else the smallest one."""
    cuts = self._list_cuts(lambda c: c.nbytes <= most_bytes)
    cuts = [c for c in cuts if c.nbytes <= most_bytes]
    best = self._smallest
    if not self._is_small:
      # By the sum of steps, a larger cut is never slower.
      found = map(self._complete, sorted(cuts, key=lambda c: c.seconds))
      return next((c for c in found if c.nbytes <= most_bytes), best)
    for cut in sorted(map(self._complete, cuts), key=_sort_key):
      seconds, flops = self.predict(cut)
      best_s, best_flops = self.predict(best)
      is_faster = seconds <= (1 - _EQUAL_TIME) * best_s
      is_better = is_faster and flops <= (1 + _EQUAL_FLOPS) * best_flops
      if is_better and cut.nbytes <= most_bytes:
        best = cut
    return best

  @functools.cached_property
  def _free(self) -> Cut:
    """The choice without a budget."""
    slowest_s = self._hull[0].seconds + _FREE_FRACTION * self._total_s
    cuts = [*self._hull, *self._list_next(lambda c: c.seconds <= slowest_s)]
    if len(cuts) == 1:
      return self._complete(cuts[0])
    # Smaller cuts take longer, so that those behind one that takes far too long
    # are not predicted.
    fast: list[tuple[float, Cut]] = []
    least_s = math.inf
    for cut in sorted(cuts, key=_sort_key, reverse=True):
      seconds, _ = self.predict(cut)
      if seconds > (1 + 2 * _FREE_FRACTION) * least_s:
        break
      least_s = min(least_s, seconds)
      fast.append((seconds, cut))
    most_s = (1 + _FREE_FRACTION) * least_s
    cut = min((c for s, c in fast if s <= most_s), key=_sort_key)
    return self._complete(cut)

  def _list_cuts(self, is_within: Callable[[Cut], bool]) -> list[Cut]:
    """Returns candidates: the cuts at all prices, and those in between."""
    # is_within: whether a cut keeps to a limit.
    cuts = list(self._hull)
    if len(self._large) <= _MOST_VALUES:
      cuts += self._subsets
    else:
      cuts += self._list_next(is_within)
    return cuts

  def _list_next(self, is_within: Callable[[Cut], bool]) -> list[Cut]:
    """Returns cuts of layers between two of the hull, next to a limit."""
    # Equal layers have equal prices, so neighboring cuts may differ by one
    # value of every layer. In between lie the cuts that save some of them.
    cuts: list[Cut] = []
    for faster, cut in itertools.pairwise(self._hull):
      more = [v for v in faster.saved if v not in {*cut.saved}]
      if is_within(faster) == is_within(cut) or len(more) <= _MOST_VALUES:
        continue
      gap = (faster.nbytes - cut.nbytes) / (self._hull[0].nbytes + 1)
      count = min(len(more), math.ceil(_SHARES * gap))
      cuts += (
        self.price([*cut.saved, *more[: n * len(more) // count]])
        for n in range(1, count)
      )
    return cuts

  @property
  def _is_small(self) -> bool:
    """Whether both passes are predicted as a whole."""
    return len(self._joint.program.steps) <= _MOST_STEPS

  def predict(self, cut: Cut) -> tuple[float, float]:
    """Predicts the seconds and FLOPs of both passes for a cut."""
    key = tuple(cut.saved)
    if key not in self._costs:
      self._costs[key] = self._predict_passes(cut)
    return self._costs[key]

  def _predict_passes(self, cut: Cut) -> tuple[float, float]:
    """Predicts both passes, or adds up steps where there are many."""
    joint = self._joint
    if not self._is_small:
      return self._total_s + cut.seconds, 0.0
    forward_s = self._forward_s
    # Results of products are written in any case.
    for value in cut.saved:
      maker, moved = joint.order.maker(value), self._count_bytes(value)
      if moved and self._table.describe(value).codec is not None:
        # What reads the array reads it decoded: that pass counts there.
        forward_s += (2 * moved + value.nbytes) * self._move_s
      elif maker is not None and not trace.is_product(maker):
        forward_s += moved * self._move_s
    seconds, flops = predict_steps(
      [*self._known, *cut.saved, *joint.cotangents],
      [*cut.rerun, *joint.backward_steps()],
      [g for g in joint.gradients if isinstance(g, Value)],
      self._device,
    )
    return forward_s + seconds, flops

  def holds_more(self, saved: Sequence[Value]) -> bool:
    """Predicts whether to save values holds no fewer bytes than plain steps."""
    # False where that is not known. Large results are for a caller whose own
    # passes come in between.
    joint, known = self._joint, {*saved, *self._known}
    results = [v for v in joint.outputs if isinstance(v, Value)]
    if (
      not self._is_small
      or not all(hasattr(v.aval, "shape") for v in self.reads)
      or any(s.name in program.LOOPS for s in joint.program.steps)
    ):
      return False
    most = max((v.nbytes for v in self.reads), default=0)
    if any(SMALL * v.nbytes > most for v in results):
      return False
    begin = [*joint.program.constants, *joint.inputs, *joint.cotangents]
    gradients = [g for g in joint.gradients if isinstance(g, Value)]
    plain = predict_peak(begin, joint.program.steps, results + gradients)
    # What runs again does so just before it is read.
    backward: list[Step] = []
    for step in joint.backward_steps():
      again = joint.order.leading_to(step.reads, {*known, *joint.backward})
      backward += [*again, step]
      known.update(v for one in again for v in one.outs)
    begin = [*self._known, *saved, *joint.cotangents]
    own = predict_peak(begin, backward, gradients)
    # Who asks for less memory gets the cut where both are equal.
    margin = 0.0 if self._has_budget else _EQUAL_FRACTION
    return plain < (1 + margin) * own

  @functools.cached_property
  def _forward_s(self) -> float:
    """Predicted seconds of the forward pass alone."""
    joint = self._joint
    outputs = [v for v in joint.outputs if isinstance(v, Value)]
    begin = [*joint.program.constants, *joint.inputs]
    steps = joint.order.leading_to(outputs, ())
    return predict_steps(begin, steps, outputs, self._device)[0]

  def _find_discontinuous(self, cut: Cut) -> Iterator[Value]:
    """Yields results of discontinuous steps rerun on rounded residuals."""
    # A ReLU mask recomputed from operands rounded to 8 bits would lose the 1 %
    # of them that are rounded to zero. Where an expensive step, a convolution
    # say, is rerun between the rounded residual and the comparison, its results
    # are seldom exactly zero, and the mask may be recomputed.
    joint, rounded = self._joint, self._find_rounded(cut)
    known = {*cut.saved, *self._known}
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

  @functools.cached_property
  def _graph(self) -> _min_cut.PricedGraph:
    return self._make_graph()

  @functools.cached_property
  def _hull(self) -> list[Cut]:
    """The cuts at all prices of a byte, from the fastest to the smallest."""
    cuts: dict[int, Cut] = {}

    def fill(low: int, high: int, flow: _min_cut.Flow) -> None:
      """Adds the cuts between two prices, unless they are nearly the same."""
      gap = cuts[low].nbytes - cuts[high].nbytes
      if high - low > 1 and 2 * _SHARES * gap > cuts[0].nbytes:
        middle = (low + high) // 2
        price_s = _PRICES[middle]
        cuts[middle], later = self._find_cut(self._graph, price_s, flow)
        fill(low, middle, flow)
        fill(middle, high, later)

    last = len(_PRICES) - 1
    cuts[0], flow = self._find_cut(self._graph, _PRICES[0])
    cuts[last], _ = self._find_cut(self._graph, _PRICES[last], flow)
    fill(0, last, flow)
    different = {tuple(cuts[i].saved): cuts[i] for i in sorted(cuts)}
    return list(different.values())

  @functools.cached_property
  def _large(self) -> list[Value]:
    """Values of some size that any cut of the hull saves, by their order."""
    # Small values matter little, and may be many.
    saved = dict.fromkeys(v for cut in self._hull for v in cut.saved)
    most = max(map(self._count_bytes, saved), default=0)
    return [
      v
      for v in self._separators.sort_values(saved)
      if v not in self._joint.inputs and SMALL * self._count_bytes(v) >= most
    ]

  @functools.cached_property
  def _subsets(self) -> list[Cut]:
    """The best sets of large values, beside small ones and inputs."""
    saved = self._separators.sort_values(
      v for cut in self._hull for v in cut.saved
    )
    may_rerun = {*self._graph.graph.steps}
    found = _subsets.find_subsets(
      self._joint,
      self.reads,
      self._known,
      [
        _subsets.Candidate(
          v, self._count_bytes(v), self._save_seconds(v), v in self._large
        )
        for v in saved
      ],
      lambda s: self._rerun_seconds(s) if s in may_rerun else math.inf,
    )
    # Of those of about the same bytes, the fastest, which is the last one.
    step = self._hull[0].nbytes / _SHARES + 1
    best = {int(one.nbytes / step): one for one in found}
    return [self.price(one.saved) for one in best.values()]

  def _complete(self, cut: Cut) -> Cut:
    """Returns a cut with separators, and without what nothing reads."""
    cut = self.price(self._separators.add_to(cut.saved))
    while new := [*self._find_discontinuous(cut)]:
      cut = self.price([*cut.saved, *new])
    used = {*self.reads, *(v for step in cut.rerun for v in step.reads)}
    return self.price([v for v in cut.saved if v in used])

  @functools.cached_property
  def _smallest(self) -> Cut:
    """The fastest cut of nearly the fewest bytes."""
    # One byte costs more than all steps together. What a few bytes spare is not
    # computed again: the sums of a norm are as many times smaller than what
    # they are computed from as that has channels.
    cut, _ = self._find_cut(self._make_graph(may_rerun_unknown=True), 1.0)
    most_bytes = (1 + _EQUAL_FRACTION) * cut.nbytes
    near = [
      c
      for c in self._hull
      if c.nbytes <= most_bytes and c.seconds < cut.seconds
    ]
    cut = near[0] if near else cut
    return self.price(self._separators.add_last(self._complete(cut).saved))

  @functools.cached_property
  def _single(self) -> Cut:
    """The fastest cut that runs no matmul, convolution or the like again."""
    graph = self._make_graph(may_rerun_products=False)
    return self._complete(self._find_cut(graph, 0.0)[0])

  def _find_cut(
    self,
    graph: _min_cut.PricedGraph,
    byte_s: float,
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
    must_keep: set[Value] = set()
    save_costs = graph.save_costs(byte_s)
    first: _min_cut.Flow | None = None
    while True:
      rerun_costs = graph.rerun_costs(must_keep)
      saved, start = graph.graph.find_cut(save_costs, rerun_costs, start)
      first = start if first is None else first
      cut = self.price(saved)
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
    is_rerun = self._table.describe(value).recomputed
    return _min_cut.Saving(
      _RECOMPUTE_COST if is_rerun else None,
      self._count_bytes(value),
      self._save_seconds(value),
    )

  def price(self, saved: Sequence[Value]) -> Cut:
    """Returns the cut that saves some values."""
    saved = self._separators.sort_values(saved)
    known = {*saved, *self._known}
    rerun = self._joint.order.leading_to(self.reads, known)
    seconds = [*map(self._rerun_seconds, rerun)]
    seconds += map(self._save_seconds, saved)
    nbytes = sum(map(self._count_bytes, saved))
    return Cut(saved, rerun, nbytes, math.fsum(seconds))

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
