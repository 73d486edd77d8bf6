"""Minimum cut between a function and its backward pass."""

import itertools
from collections.abc import Callable, Iterable, Sequence, Set as AbstractSet
from typing import NamedTuple

from jaxmotion import program
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import _residual
from jaxmotion.memory.residuals.choose._max_flow import UNCUTTABLE, FlowGraph
from jaxmotion.program import Step, Value

# Costs are integers: seconds in units of 1e-18.
UNITS_PER_S = 1e18


def values_read_by_backward(
  joint: trace.JointProgram, always_live: Iterable[Value]
) -> list[Value]:
  """Returns the forward values that the backward pass reads."""
  excluded = {*always_live, *joint.program.constants, *joint.backward}
  reads = [v for step in joint.backward_steps() for v in step.reads]
  reads += [g for g in joint.gradients if isinstance(g, Value)]
  return list(dict.fromkeys(v for v in reads if v not in excluded))


class Flow(NamedTuple):
  """A flow that a search found, from which another search may go on."""

  save_costs: Sequence[int]  # Of saving each value, when it was found.
  rerun_costs: Sequence[int]  # Of running each step again, likewise.
  capacity: list[int]  # What each edge can carry more.


class CutGraph:
  """Graph whose minimum cuts are the cheapest values to save.

  The graph has two nodes for each forward value, joined by an edge whose
  capacity is the cost of saving that value. An edge from the source to each
  step has the cost of rerunning that step. All other edges are uncuttable:
  from each operand of a step to the step (whoever reruns the step needs the
  operand), from a step to each of its results (whoever wants one reruns the
  step), from the source to each input, and from each value that the backward
  pass reads to the sink. A cut then pays for the values to save and the steps
  to rerun. Nodes that an uncuttable edge joins to source or sink are that node,
  and a step of one result is the node that stands for computing it.

  The graph is built once. Costs differ between searches, and where none is less
  than in an earlier search, a search goes on from the earlier flow.

  References:
    He and Yu, *Transcending runtime-memory tradeoffs in checkpointing by being
    fusion aware*, 2023 (the partitioner of PyTorch 2 by minimum cut).
  """

  def __init__(
    self,
    joint: trace.JointProgram,
    reads: Iterable[Value],
    known: Iterable[Value],
    must_save: Callable[[Step], bool],
  ):
    # reads: forward values that the backward pass reads; known: values that it
    # has at no cost; must_save: whether a step must not run again.
    free = {*known, *joint.program.constants}
    sinks = {v: FlowGraph.SINK for v in reads if v not in free}
    # Not beyond what is known: what a known value follows from may be gone.
    steps = joint.order.leading_to(sinks, free)
    # What a cut may run again, and what it may save, in order.
    self.steps = [step for step in steps if not must_save(step)]
    self.values = [v for v in joint.inputs if v not in free]
    self.values += [v for s in steps for v in s.outs if v not in free]
    numbers = itertools.count(2)
    # Nodes that stand for having a value, for computing it, and for rerunning a
    # step.
    self._have = {
      v: sinks[v] if v in sinks else next(numbers) for v in self.values
    }
    self._compute = dict.fromkeys(self.values, FlowGraph.SOURCE)
    rerun: list[int] = []
    for step in self.steps:
      made = [v for v in step.outs if v not in free]
      rerun.append(next(numbers))
      self._compute.update((v, rerun[-1]) for v in made[:1])
      if len(made) > 1:
        self._compute.update((v, next(numbers)) for v in made)
    self._graph = graph = FlowGraph(next(numbers))
    self._save_edges = [
      graph.add_edge(self._compute[v], self._have[v], 0) for v in self.values
    ]
    self._rerun_edges = [
      graph.add_edge(FlowGraph.SOURCE, node, 0) for node in rerun
    ]
    for step, node in zip(self.steps, rerun, strict=True):
      for value in step.outs:
        if value in self._compute and self._compute[value] != node:
          graph.add_edge(node, self._compute[value], UNCUTTABLE)
      for value in dict.fromkeys(step.reads):
        if self._have.get(value, FlowGraph.SINK) != FlowGraph.SINK:
          graph.add_edge(self._have[value], node, UNCUTTABLE)
    self._no_flow = Flow(
      [0] * len(self.values), [0] * len(rerun), list(graph.capacity)
    )

  def find_cut(
    self,
    save_costs: Sequence[int],
    rerun_costs: Sequence[int],
    start: Flow | None = None,
  ) -> tuple[list[Value], Flow]:
    """Finds the cheapest set of values from which the backward pass follows."""
    # Returns the values to save, in the order in which they are computed, and
    # the flow.
    begin = self._no_flow if start is None else start
    capacity = self._graph.capacity = list(begin.capacity)
    for edges, before, costs in (
      (self._save_edges, begin.save_costs, save_costs),
      (self._rerun_edges, begin.rerun_costs, rerun_costs),
    ):
      for edge, old, new in zip(edges, before, costs, strict=True):
        capacity[edge] += new - old
    side = self._graph.find_sink_side()
    saved = [
      v
      for v in self.values
      if self._have[v] in side and self._compute[v] not in side
    ]
    return saved, Flow(save_costs, rerun_costs, capacity)


class Saving(NamedTuple):
  """Costs of saving a value, but for the price of a byte."""

  cost: int | None  # At any price of a byte; None where it depends on that.
  nbytes: int
  seconds: float  # Of saving and of reading it.


class PricedGraph(NamedTuple):
  """A graph with what its cuts cost, at any price of a byte."""

  graph: CutGraph
  savings: list[Saving]  # Of each value.
  rerun: list[int]  # Cost of rerunning each step.
  # Position of the step that makes a value, unless it was chosen to be
  # recomputed.
  maker: dict[Value, int]

  def save_costs(self, byte_s: float) -> list[int]:
    """Returns the cost of saving each value."""
    # byte_s: seconds that a byte may cost.
    # Even an empty array costs 1: a cut of no cost could be anywhere.
    return [
      max(1, int(UNITS_PER_S * (byte_s * nbytes + seconds)))
      if cost is None
      else cost
      for cost, nbytes, seconds in self.savings
    ]

  def rerun_costs(self, kept: AbstractSet[Value]) -> list[int]:
    """Returns the cost of rerunning each step, if some values are kept."""
    costs = list(self.rerun)
    for value in kept:
      if value in self.maker:
        costs[self.maker[value]] = UNCUTTABLE
    return costs


def choose_cached(
  joint: trace.JointProgram,
  reads: Sequence[Value],
  known: Iterable[Value],
  table: _residual.ResidualTable,
) -> dict[Value, _residual.Residual]:
  """Chooses which recomputed values to save again until their last use."""
  # Without them each reader would recompute for itself: the exponential of a
  # transformer's attention scores was computed three times, and XLA kept the
  # scores rather than the exponential. The cut goes through values that follow
  # without another expensive step from what was recomputed, so no expensive
  # step runs more than twice in all. The values are saved exactly: they live
  # for a short time only.

  def count_bytes(value: Value) -> int:
    # An abstract token has no shape. Nothing is free: a cut of no cost could be
    # anywhere.
    if not hasattr(value.aval, "shape"):
      return 1
    return max(1, table.describe_exact(value).encoded_bytes)

  graph = CutGraph(joint, reads, known, lambda s: program.is_expensive(s.eqn))
  costs = [*map(count_bytes, graph.values)]
  chosen, _ = graph.find_cut(costs, [0] * len(graph.steps))
  return {v: table.describe_exact(v) for v in chosen}
