"""Minimum cut between a function and its backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from jaxmotion import program
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import _max_flow


def values_read_by_backward(
  joint: trace.JointProgram, always_live: Iterable[program.Value]
) -> list[program.Value]:
  """Returns the forward values that the backward pass reads."""
  excluded = {*always_live, *joint.program.constants, *joint.backward}
  found: dict[program.Value, None] = {}
  for step in joint.backward_steps():
    found.update((v, None) for v in step.reads if v not in excluded)
  for gradient in joint.gradients:
    if isinstance(gradient, program.Value) and gradient not in excluded:
      found[gradient] = None
  return list(found)


class Flow(NamedTuple):
  """A flow that a search found, from which another search may go on.

  Attributes:
    save_costs: cost of saving each value, when it was found.
    rerun_costs: cost of running each step again, when it was found.
    capacity: what each edge can carry more.
  """

  save_costs: Sequence[int]
  rerun_costs: Sequence[int]
  capacity: list[int]


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

  Args:
    joint: the function and its backward pass.
    reads: forward values that the backward pass reads.
    known: values that the backward pass has at no cost.
    must_save: says of a step that it must not run again in any search.

  Attributes:
    values: values that a cut may save, in the order in which they are computed.
    steps: steps that a cut may run again, in order.

  References:
    He and Yu, *Transcending runtime-memory tradeoffs in checkpointing by being
    fusion aware*, 2023 (the partitioner of PyTorch 2 by minimum cut).
  """

  def __init__(
    self,
    joint: trace.JointProgram,
    reads: Iterable[program.Value],
    known: Iterable[program.Value],
    must_save: Callable[[program.Step], bool],
  ):
    free = {*known, *joint.program.constants}
    sinks = {v: _max_flow.FlowGraph.SINK for v in reads if v not in free}
    # Not beyond what is known: what a known value follows from may be gone.
    steps = joint.order.leading_to(sinks, free)
    self.steps = [step for step in steps if not must_save(step)]
    self.values = [v for v in joint.inputs if v not in free]
    self.values += [v for s in steps for v in s.outs if v not in free]
    numbers = itertools.count(2)
    # Nodes that stand for having a value, for computing it, and for rerunning a
    # step.
    self._have = {
      v: sinks[v] if v in sinks else next(numbers) for v in self.values
    }
    self._compute = dict.fromkeys(self.values, _max_flow.FlowGraph.SOURCE)
    rerun: list[int] = []
    for step in self.steps:
      made = [v for v in step.outs if v not in free]
      rerun.append(next(numbers))
      self._compute.update((v, rerun[-1]) for v in made[:1])
      if len(made) > 1:
        self._compute.update((v, next(numbers)) for v in made)
    self._graph = graph = _max_flow.FlowGraph(next(numbers))
    self._save_edges = [
      graph.add_edge(self._compute[v], self._have[v], 0) for v in self.values
    ]
    self._rerun_edges = [
      graph.add_edge(_max_flow.FlowGraph.SOURCE, node, 0) for node in rerun
    ]
    for step, node in zip(self.steps, rerun, strict=True):
      for value in step.outs:
        if value in self._compute and self._compute[value] != node:
          graph.add_edge(node, self._compute[value], _max_flow.UNCUTTABLE)
      for value in dict.fromkeys(step.reads):
        if (
          self._have.get(value, _max_flow.FlowGraph.SINK)
          != _max_flow.FlowGraph.SINK
        ):
          graph.add_edge(self._have[value], node, _max_flow.UNCUTTABLE)
    self._no_flow = Flow(
      [0] * len(self.values), [0] * len(rerun), list(graph.capacity)
    )

  def find_cut(
    self,
    save_costs: Sequence[int],
    rerun_costs: Sequence[int],
    start: Flow | None = None,
  ) -> tuple[list[program.Value], Flow]:
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
