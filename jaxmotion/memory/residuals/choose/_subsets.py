"""Prices all subsets of a few values that a forward pass may save.

Minimum cuts find sets on the lower hull of seconds over bytes alone. Between
two of them a budget may allow a faster set that no price of a byte leads to.
Where cuts differ in few values, all subsets of these are priced at once.
"""

import math
from collections.abc import Callable, Collection, Sequence, Set as AbstractSet
from typing import NamedTuple

import numpy as np

from jaxmotion.memory.residuals import trace
from jaxmotion.program import Step, Value


class Candidate(NamedTuple):
  """A value that may be saved, with what that costs."""

  value: Value
  nbytes: int
  seconds: float  # Of saving and of reading it.
  may_be_missing: bool  # Whether subsets may be without it.


class Subset(NamedTuple):
  """Values to save, with what that costs."""

  saved: list[Value]  # In the order of the candidates.
  nbytes: int
  seconds: float  # Of saving them and of the steps that run again.


class _Segment(NamedTuple):
  """Steps that run again if what they lead to is wanted and not saved."""

  steps: list[Step]  # Back to known values and candidates.
  reads: set[Value]  # What they, or the backward pass, read.
  is_possible: bool  # Whether all else that is read is there.


def find_subsets(
  joint: trace.JointProgram,
  reads: Sequence[Value],
  known: Collection[Value],
  candidates: Sequence[Candidate],
  count_seconds: Callable[[Step], float],
) -> list[Subset]:
  """Finds the subsets of which none is both larger and slower than another."""
  # Time and memory double with each candidate that may be missing.
  # count_seconds: returns the seconds of running a step again; infinity for a
  # step that must not.
  # Returns subsets from which all reads follow, from the fewest bytes to the
  # fewest seconds.
  free = [c for c in candidates if c.may_be_missing]
  always = [c for c in candidates if not c.may_be_missing]
  # Bit i of a subset's index says whether it has the i-th free candidate. All
  # arrays below have an element for each subset.
  index = np.arange(1 << len(free))
  is_read = {c.value: np.zeros(index.shape, bool) for c in free}
  stops = {*known, *(c.value for c in candidates)}
  nbytes = np.full(index.shape, sum(c.nbytes for c in always))
  seconds = np.full(index.shape, math.fsum(c.seconds for c in always))
  # The backward pass first: what a segment reads is made before it. `runs`:
  # whether each segment runs.
  segments = [_find_segment(joint, reads, stops)]
  runs = [np.ones(index.shape, bool)]
  for i, one in reversed([*enumerate(free)]):
    for value in segments[-1].reads & is_read.keys():
      is_read[value] |= runs[-1]
    is_saved = (index >> i & 1).astype(bool)
    nbytes += one.nbytes * is_saved
    seconds += one.seconds * is_saved
    segments.append(_find_segment(joint, [one.value], stops - {one.value}))
    runs.append(is_read[one.value] & ~is_saved)
  for numbers, step_s in _sum_seconds(segments, count_seconds).items():
    is_run = np.logical_or.reduce([runs[n] for n in numbers])
    seconds += np.where(is_run, step_s, 0.0)
  order = np.lexsort((seconds, nbytes))
  best = np.minimum.accumulate(seconds[order])
  is_better = best < np.concatenate(([math.inf], best[:-1]))
  number = {c.value: i for i, c in enumerate(free)}
  return [
    Subset(
      [
        c.value
        for c in candidates
        if not c.may_be_missing or i >> number[c.value] & 1
      ],
      int(nbytes[i]),
      float(seconds[i]),
    )
    for i in order[is_better].tolist()
  ]


def _find_segment(
  joint: trace.JointProgram, wanted: Sequence[Value], stops: AbstractSet[Value]
) -> _Segment:
  """Returns the steps to some values, as far as they have no other segment."""
  steps = joint.order.leading_to(wanted, stops)
  reads = {*wanted, *(v for step in steps for v in step.reads)}
  is_possible = (reads - stops).isdisjoint(joint.inputs)
  return _Segment(steps, reads, is_possible)


def _sum_seconds(
  segments: Sequence[_Segment], count_seconds: Callable[[Step], float]
) -> dict[tuple[int, ...], float]:
  """Adds up the seconds of steps that are part of the same segments."""
  # A step of several segments runs once if any of them runs. A segment that
  # cannot run takes infinitely long.
  segments_of: dict[Step, tuple[int, ...]] = {}
  seconds: dict[tuple[int, ...], float] = {
    (n,): math.inf for n, one in enumerate(segments) if not one.is_possible
  }
  for n, segment in enumerate(segments):
    for step in segment.steps:
      segments_of[step] = (*segments_of.get(step, ()), n)
  for step, numbers in segments_of.items():
    seconds[numbers] = seconds.get(numbers, 0.0) + count_seconds(step)
  return seconds
