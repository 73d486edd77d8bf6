"""Minimum cut between a function and its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxmotion.memory.residuals.choose._max_flow import UNCUTTABLE, FlowGraph
from jaxmotion.memory.residuals.trace import JointProgram
from jaxmotion.program import Step, Value


def values_read_by_backward(
  joint: JointProgram, always_live: Iterable[Value]
) -> list[Value]:
  """Returns the forward values that the backward pass reads.

  Args:
    joint: the function and its backward pass.
    always_live: inputs that are never saved.
  """
  excluded = {*always_live, *joint.program.constants, *joint.backward}
  found: dict[Value, None] = {}
  for step in joint.backward_steps():
    found.update((v, None) for v in step.reads if v not in excluded)
  for gradient in joint.gradients:
    if isinstance(gradient, Value) and gradient not in excluded:
      found[gradient] = None
  return list(found)


def find_minimum_cut(
  joint: JointProgram,
  reads: Iterable[Value],
  known: Iterable[Value],
  cost: Callable[[Value], int],
  rerun_cost: Callable[[Step], int | None],
) -> list[Value]:
  """Chooses the cheapest set of values from which the backward pass follows.

  The graph has two nodes for each forward value, joined by an edge whose
  capacity is the cost of saving that value, and one node for each step, which
  an edge of the cost of rerunning it joins to the source. All other edges are
  uncuttable: from each operand of a step to each result (whoever recomputes the
  result needs the operand), from a step to each of its results (whoever wants
  one reruns the step), from the source to each input and to each result of a
  step that must not be rerun, and from each value that the backward pass reads
  to the sink. A cut then pays for the values to save and the steps to rerun.

  Args:
    joint: the function and its backward pass.
    reads: forward values that the backward pass reads.
    known: values that the backward pass has at no cost.
    cost: cost of saving a value.
    rerun_cost: cost of running a step again, in the same unit; None for a step
      that must not run again.

  Returns:
    The values to save, in the order in which they are computed.

  References:
    He and Yu, *Transcending runtime-memory tradeoffs in checkpointing by being
    fusion aware*, 2023 (the partitioner of PyTorch 2 by minimum cut).
  """
  free = {*known, *joint.program.constants}
  sinks = [v for v in reads if v not in free]
  # Not beyond what is known: what a known value follows from may be gone.
  steps = joint.order.leading_to(sinks, free)
  values = [v for v in joint.inputs if v not in free]
  sources = list(values)
  paid: list[tuple[int, list[Value]]] = []
  for step in steps:
    made = [v for v in step.outs if v not in free]
    values += made
    again = rerun_cost(step)
    if again is None:
      sources += made
    elif again:
      paid.append((again, made))
  # Node n stands for computing a value, node n + 1 for having it.
  node = {v: 2 + 2 * i for i, v in enumerate(values)}
  graph = FlowGraph(2 + 2 * len(values) + len(paid))
  for value, n in node.items():
    # Even an empty array costs 1: a cut of no cost could be anywhere.
    graph.add_edge(n, n + 1, max(1, cost(value)))
  for value in sources:
    graph.add_edge(FlowGraph.SOURCE, node[value], UNCUTTABLE)
  for i, (again, made) in enumerate(paid, 2 + 2 * len(values)):
    graph.add_edge(FlowGraph.SOURCE, i, again)
    for value in made:
      graph.add_edge(i, node[value], UNCUTTABLE)
  for step in steps:
    for operand in step.reads:
      for result in step.outs:
        if operand in node and result in node:
          graph.add_edge(node[operand] + 1, node[result], UNCUTTABLE)
  for value in sinks:
    graph.add_edge(node[value] + 1, FlowGraph.SINK, UNCUTTABLE)
  sink_side = graph.find_sink_side()
  return [
    v for v, n in node.items() if n not in sink_side and n + 1 in sink_side
  ]
