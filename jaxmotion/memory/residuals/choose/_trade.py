"""Trades the bytes of saved values for the seconds of recomputing others."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxmotion.memory.residuals.choose._min_cut import (
  find_minimum_cut,
  values_read_by_backward,
)
from jaxmotion.memory.residuals.choose._options import Options
from jaxmotion.memory.residuals.choose._residual import Residual
from jaxmotion.memory.residuals.choose._residual_table import ResidualTable
from jaxmotion.memory.residuals.trace import JointProgram
from jaxmotion.perfmodel.extend import operation_seconds
from jaxmotion.program import (
  Step,
  Value,
  is_discontinuous,
  is_expensive,
  is_float_equality,
)

# Cost of saving a value that is to be recomputed: more than all residuals
# together, less than an edge that cannot be cut, so that an argument that is
# the only source is saved all the same.
_RECOMPUTE_COST = 1 << 90
# Costs are integers: seconds in units of 1e-18.
_UNITS_PER_S = 1e18
# Without a budget, the share of a function's time that recomputing may add.
_FREE_SHARE = 0.01
# Seconds that a byte may cost, in steps of a factor of 1.5.
_PRICES = tuple(1e-15 * 1.5**i for i in range(40))


class Cut(NamedTuple):
  """Values to save, and what that costs.

  Attributes:
    saved: values that the forward pass saves.
    rerun: steps that the backward pass runs again.
    nbytes: encoded bytes of all saved values.
    seconds: seconds of saving them and of recomputing the others.
  """

  saved: list[Value]
  rerun: list[Step]
  nbytes: int
  seconds: float


class Trade:
  """Choice of what to save, by minimum cuts over seconds and bytes.

  Saving a value takes the time to write and read it. Recomputing it takes the
  time of the steps in between. A price of a byte, in seconds, makes both
  comparable with memory. At price 0 the cut is the fastest, and a higher price
  never saves more bytes.

  Args:
    joint: the function and its backward pass.
    live: inputs that stay in memory anyway.
    table: residual of each value.
    options: options of the choice.

  Attributes:
    reads: forward values that the backward pass reads.
  """

  def __init__(
    self,
    joint: JointProgram,
    live: frozenset[Value],
    table: ResidualTable,
    options: Options,
  ):
    self._joint, self._live, self._table = joint, live, table
    self._budget = options.memory_budget
    self._move_s = 1 / options.device.memory_rate.bytes_per_s
    self._seconds = {
      id(step): operation_seconds(step, options.device)
      for step in joint.program.steps
    }
    self.reads = values_read_by_backward(joint, live)

  def choose_cut(self) -> Cut:
    """Chooses the values to save.

    Without a budget, the cut of the fewest bytes that takes at most 1 % of the
    function's own time more than the fastest one. With a budget, the fastest
    cut whose bytes are at most that share of the fastest one's.
    """
    if self._budget == 0:
      return self._cut(None)
    fastest = self._cut(0.0)
    known_s = [s for s in self._seconds.values() if math.isfinite(s)]
    most_s = fastest.seconds + _FREE_SHARE * math.fsum(known_s)
    most_bytes = fastest.nbytes * (
      1.0 if self._budget is None else self._budget
    )

    def is_fast(cut: Cut) -> bool:
      return cut.seconds <= most_s

    def is_small(cut: Cut) -> bool:
      return cut.nbytes <= most_bytes

    cuts = {-1: fastest}

    def is_beyond(i: int) -> bool:
      """Says whether a price is higher than the wanted one."""
      cuts[i] = self._cut(_PRICES[i])
      return not is_fast(cuts[i]) if self._budget is None else is_small(cuts[i])

    if self._budget is not None and is_small(fastest):
      return fastest
    first = bisect.bisect_left(range(len(_PRICES)), True, key=is_beyond)
    if first == len(_PRICES):
      return cuts[first - 1] if self._budget is None else self._cut(None)
    more, fewer = cuts[first - 1], cuts[first]
    is_wanted = is_fast if self._budget is None else is_small
    return self._fill(_PRICES[first], more, fewer, is_wanted)

  def _fill(
    self,
    price_s: float,
    more: Cut,
    fewer: Cut,
    is_wanted: Callable[[Cut], bool],
  ) -> Cut:
    """Returns a cut between two neighbors, as near to the limit as it gets.

    Equal layers have equal prices, so neighboring cuts may differ by one value
    of every layer. In between lie the cuts that save some of them.

    Args:
      price_s: price of a byte of the smaller cut.
      more: the cut that saves more bytes.
      fewer: the cut that takes more seconds.
      is_wanted: whether a cut keeps to the limit of bytes, or of seconds.
    """
    saved_by_fewer = set(fewer.saved)
    between = [v for v in more.saved if v not in saved_by_fewer]
    cuts = {0: fewer, len(between): more}

    def keeps_limit(count: int) -> bool:
      if count not in cuts:
        cuts[count] = self._cut(price_s, between[:count])
      return is_wanted(cuts[count])

    counts = range(len(between) + 1)
    if self._budget is None:
      return cuts[
        min(bisect.bisect_left(counts, True, key=keeps_limit), len(between))
      ]
    return cuts[
      bisect.bisect_left(counts, True, key=lambda n: not keeps_limit(n)) - 1
    ]

  def _cut(self, price_s: float | None, must_save: Sequence[Value] = ()) -> Cut:
    """Finds the cheapest cut at a price of a byte.

    The backward pass must not rerun a step that compares floats for equality,
    or that is a loop with residuals of its own. It must neither rerun a
    discontinuous step on rounded operands, but which operands are rounded is
    known only after the cut. So the cut is repeated with the results of such
    steps added to `kept`, which only grows, until there are no new ones.

    Args:
      price_s: seconds that a byte may cost; None for the fewest bytes.
      must_save: values that must not be recomputed.
    """
    joint, table = self._joint, self._table
    kept = set(must_save)
    # For the fewest bytes, one byte costs more than all steps together.
    byte_s = 1.0 if price_s is None else price_s

    def save_cost(value: Value) -> int:
      if not hasattr(value.aval, "shape"):
        return 1  # An abstract token.
      residual = table.describe(value)
      if residual.recomputed:
        return _RECOMPUTE_COST
      seconds = byte_s * residual.encoded_bytes + self._save_seconds(residual)
      return int(_UNITS_PER_S * seconds)

    def rerun_cost(step: Step) -> int | None:
      if any(table.describe(v).recomputed for v in step.outs):
        return 0
      # A name is given to a value by a step that copies nothing: what is kept
      # is the value.
      if step.name != "name" and any(table.describe(v).kept for v in step.outs):
        return None
      seconds = self._seconds[id(step)]
      if price_s is None and step.name != "scan" and math.isinf(seconds):
        seconds = 0.0
      if (
        math.isinf(seconds)
        or is_float_equality(step.eqn)
        or not kept.isdisjoint(step.outs)
      ):
        return None
      return int(_UNITS_PER_S * seconds)

    while True:
      cut = self._price(
        find_minimum_cut(joint, self.reads, self._live, save_cost, rerun_cost)
      )
      found = set(_discontinuous_on_rounded(joint, self._live, cut, table))
      if not found - kept:
        return cut
      kept |= found

  def _price(self, saved: list[Value]) -> Cut:
    joint = self._joint
    known = {*saved, *self._live, *joint.program.constants}
    rerun = joint.order.leading_to(self.reads, known)
    rerun_s = (self._seconds[id(step)] for step in rerun)
    residuals = [
      self._table.describe(v) for v in saved if hasattr(v.aval, "shape")
    ]
    seconds = [s for s in rerun_s if math.isfinite(s)]
    seconds += map(self._save_seconds, residuals)
    nbytes = sum(r.encoded_bytes for r in residuals)
    return Cut(saved, rerun, nbytes, math.fsum(seconds))

  def _save_seconds(self, residual: Residual) -> float:
    """Returns the seconds of writing what is saved, and of reading it."""
    moved = 2 * residual.encoded_bytes
    if residual.codec is not None:  # Encoding reads the array, decoding writes.
      moved += 2 * residual.nbytes
    return moved * self._move_s


def _discontinuous_on_rounded(
  joint: JointProgram,
  live: frozenset[Value],
  cut: Cut,
  table: ResidualTable,
) -> Iterator[Value]:
  """Yields results of discontinuous steps rerun on rounded residuals.

  A ReLU mask recomputed from operands rounded to 8 bits would lose the 1 % of
  them that are rounded to zero. Where an expensive step, a convolution say,
  is rerun between the rounded residual and the comparison, its results are
  seldom exactly zero, and the mask may be recomputed.
  """
  rounded = {v for v in cut.saved if table.describe(v).is_lossy}
  known = {*cut.saved, *live, *joint.program.constants}
  for step in cut.rerun:
    if is_discontinuous(step.eqn):
      before = joint.order.leading_to(step.reads, known)
      used = {v for s in (*before, step) for v in s.reads}
      if used & rounded and not any(is_expensive(s.eqn) for s in before):
        yield from step.outs
