"""Values that a forward pass saves, and what then runs on rounded ones."""

from __future__ import annotations

from collections.abc import Iterator, Set as AbstractSet
from typing import NamedTuple

from jaxmotion import program
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import _residual_table


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

  saved: list[program.Value]
  rerun: list[program.Step]
  nbytes: int
  seconds: float
  separators: AbstractSet[program.Value]


def is_product(step: program.Step) -> bool:
  """Says whether a step is a matmul, a convolution or the like."""
  return program.is_expensive(step.eqn) and step.name not in program.REDUCTIONS


def find_comparisons_behind_products(
  cut: Cut, table: _residual_table.ResidualTable
) -> Iterator[program.Step]:
  """Yields steps that run again and compare products of rounded residuals."""
  rounded = {v for v in cut.saved if table.describe(v).is_lossy}
  behind: set[program.Value] = set()
  for step in cut.rerun:
    if any(v in behind for v in step.reads) or (
      is_product(step) and any(v in rounded for v in step.reads)
    ):
      behind.update(step.outs)
      if program.is_discontinuous(step.eqn) and step.outs[0].aval.dtype == bool:
        yield step
    elif any(v in rounded for v in step.reads):
      rounded.update(step.outs)


def find_discontinuous_on_rounded(
  joint: trace.JointProgram,
  live: frozenset[program.Value],
  cut: Cut,
  table: _residual_table.ResidualTable,
) -> Iterator[program.Value]:
  """Yields results of discontinuous steps rerun on rounded residuals."""
  # A ReLU mask recomputed from operands rounded to 8 bits would lose the 1 % of
  # them that are rounded to zero. Where an expensive step, a convolution say,
  # is rerun between the rounded residual and the comparison, its results are
  # seldom exactly zero, and the mask may be recomputed.
  rounded = {v for v in cut.saved if table.describe(v).is_lossy}
  known = {*cut.saved, *live, *joint.program.constants}
  for step in cut.rerun:
    if program.is_discontinuous(step.eqn):
      before = joint.order.leading_to(step.reads, known)
      used = {v for s in (*before, step) for v in s.reads}
      if used & rounded and not any(
        program.is_expensive(s.eqn) for s in before
      ):
        yield from step.outs
