"""Graph of cuts with what they cost, at any price of a byte."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from jaxmotion import program
from jaxmotion.memory.residuals.choose import _max_flow, _min_cut

UNITS_PER_S = 1e18
"""Costs are integers: seconds in units of 1e-18."""


class Saving(NamedTuple):
  """Costs of saving a value, but for the price of a byte.

  Attributes:
    cost: cost at any price of a byte; None where it depends on that.
    nbytes: encoded bytes.
    seconds: seconds of saving and of reading it.
  """

  cost: int | None
  nbytes: int
  seconds: float


class PricedGraph(NamedTuple):
  """A graph with what its cuts cost.

  Attributes:
    graph: the graph.
    savings: for each value, what saving it costs.
    rerun: for each step, what rerunning it costs.
    maker: position of the step that makes a value, unless it was chosen to be
      recomputed.
  """

  graph: _min_cut.CutGraph
  savings: list[Saving]
  rerun: list[int]
  maker: dict[program.Value, int]

  def save_costs(self, byte_s: float) -> list[int]:
    """Returns the cost of saving each value."""
    # `byte_s`: seconds that a byte may cost.
    # Even an empty array costs 1: a cut of no cost could be anywhere.
    return [
      max(1, int(UNITS_PER_S * (byte_s * nbytes + seconds)))
      if cost is None
      else cost
      for cost, nbytes, seconds in self.savings
    ]

  def rerun_costs(self, kept: AbstractSet[program.Value]) -> list[int]:
    """Returns the cost of rerunning each step."""
    costs = list(self.rerun)
    for value in kept:
      if value in self.maker:
        costs[self.maker[value]] = _max_flow.UNCUTTABLE
    return costs
