"""Values that a forward pass saves, and what then runs on rounded ones."""

from __future__ import annotations

from collections.abc import Iterator, Set as AbstractSet
from typing import NamedTuple

from jaxmotion.memory.residuals.choose._residual_table import ResidualTable
from jaxmotion.memory.residuals.trace import JointProgram
from jaxmotion.program import (
  REDUCTIONS,
  Step,
  Value,
  is_discontinuous,
  is_expensive,
)


class Cut(NamedTuple):
  """Values to save, and what that costs.

  Attributes:
    saved: values that the forward pass saves.
    rerun: steps that the backward pass runs again.
    nbytes: encoded bytes of all saved values, fewer for inputs that are in
      memory anyway.
    seconds: seconds of saving them and of recomputing the others.
    separators: those of `saved` that split what runs again.
  """

  saved: list[Value]
  rerun: list[Step]
  nbytes: int
  seconds: float
  separators: AbstractSet[Value]


def is_product(step: Step) -> bool:
  """Says whether a step is a matmul, a convolution or the like."""
  return is_expensive(step.eqn) and step.name not in REDUCTIONS


def find_comparisons_behind_products(
  cut: Cut, table: ResidualTable
) -> Iterator[Step]:
  """Yields steps that run again and compare products of rounded residuals."""
  rounded = {v for v in cut.saved if table.describe(v).is_lossy}
  behind: set[Value] = set()
  for step in cut.rerun:
    if any(v in behind for v in step.reads) or (
      is_product(step) and any(v in rounded for v in step.reads)
    ):
      behind.update(step.outs)
      if is_discontinuous(step.eqn) and step.outs[0].aval.dtype == bool:
        yield step
    elif any(v in rounded for v in step.reads):
      rounded.update(step.outs)


def find_discontinuous_on_rounded(
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
