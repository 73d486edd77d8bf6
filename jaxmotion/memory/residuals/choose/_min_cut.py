"""Which values cross from a function to its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxmotion.memory.residuals.choose._max_flow import ENDLESS, Graph
from jaxmotion.memory.residuals.trace import JointProgram
from jaxmotion.program import Step, Value


def wanted(joint: JointProgram, free: Iterable[Value]) -> list[Value]:
  """Returns the values of the function that its backward pass reads."""
  given = {*free, *joint.program.constants, *joint.backward}
  found: dict[Value, None] = {}
  for step in joint.backward_steps():
    found.update((v, None) for v in step.reads if v not in given)
  for gradient in joint.gradients:
    if isinstance(gradient, Value) and gradient not in given:
      found[gradient] = None
  return list(found)


def minimum_cut(
  joint: JointProgram,
  free: Iterable[Value],
  weigh: Callable[[Value], int],
  once: Callable[[Step], bool],
) -> list[Value]:
  """Chooses what to keep so that everything wanted can be had from it.

  A value is a pair of nodes with an edge between them whose capacity is what
  keeping it weighs; an edge that cannot be cut leads from each operand to each
  result, from the source to what must not be computed again, and from what is
  wanted to the sink. The minimum cut goes through the values to keep.

  Args:
    joint: the function and its backward pass.
    free: values that are there anyway.
    weigh: bytes of keeping a value.
    once: whether a step must not be done again.

  Returns:
    The values, in the order they are computed in.

  References:
    He and Yu, *Transcending runtime-memory tradeoffs in checkpointing by being
    fusion aware*, 2023 (the partitioner of PyTorch 2 by minimum cut).
  """
  sinks = wanted(joint, free)
  steps = joint.order.leading_to(sinks, ())
  skipped = {*free, *joint.program.constants}
  values = [v for v in joint.inputs if v not in skipped]
  starts = list(values)
  for step in steps:
    values += step.outs
    if once(step):
      starts += step.outs
  place = {v: 2 + 2 * i for i, v in enumerate(values)}
  graph = Graph(2 + 2 * len(values))
  for value, node in place.items():
    graph.edge(node, node + 1, max(1, weigh(value)))
  for value in starts:
    graph.edge(Graph.SOURCE, place[value], ENDLESS)
  for step in steps:
    for operand in step.reads:
      for result in step.outs if operand in place else ():
        graph.edge(place[operand] + 1, place[result], ENDLESS)
  for value in sinks:
    graph.edge(place[value] + 1, Graph.SINK, ENDLESS)
  late = graph.cut()
  return [v for v, n in place.items() if n not in late and n + 1 in late]
