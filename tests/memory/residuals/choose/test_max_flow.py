import itertools

import numpy as np
import pytest

from jaxmotion.memory.residuals.choose._max_flow import UNCUTTABLE, FlowGraph


def least_cut_by_search(nodes, edges):
  """Returns the least capacity of any cut."""
  best = None
  for sides in itertools.product((0, 1), repeat=nodes - 2):
    side = (0, 1, *sides)
    cost = sum(c for a, b, c in edges if side[a] == 0 and side[b] == 1)
    best = cost if best is None else min(best, cost)
  return best


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_cheaper(seed):
  rng = np.random.default_rng(seed)
  nodes = int(rng.integers(3, 9))
  edges = [
    (int(a), int(b), int(rng.integers(1, 9)))
    for a, b in rng.integers(0, nodes, (20, 2))
    if a != b
  ]
  graph = FlowGraph(nodes)
  for edge in edges:
    graph.add_edge(*edge)
  sink_side = graph.find_sink_side()
  assert FlowGraph.SINK in sink_side and FlowGraph.SOURCE not in sink_side
  cost = sum(c for a, b, c in edges if a not in sink_side and b in sink_side)
  assert cost == least_cut_by_search(nodes, edges)


def test_of_equal_cuts_the_one_nearest_to_the_sink_is_taken():
  graph = FlowGraph(4)
  for a, b in ((0, 2), (2, 3), (3, 1)):
    graph.add_edge(a, b, 5)
  assert graph.find_sink_side() == {1}


def test_uncuttable_edges_are_not_cut():
  graph = FlowGraph(3)
  graph.add_edge(0, 2, UNCUTTABLE)
  graph.add_edge(2, 1, 7)
  assert graph.find_sink_side() == {1}


@pytest.mark.parametrize("seed", range(10))
def test_a_search_goes_on_from_the_flow_of_smaller_capacities(seed):
  rng = np.random.default_rng(seed)
  ends = [(int(a), int(b)) for a, b in rng.integers(0, 8, (24, 2)) if a != b]
  graph = FlowGraph(8)
  edges = [graph.add_edge(a, b, int(rng.integers(1, 9))) for a, b in ends]
  room = [graph.capacity[edge] for edge in edges]
  for _ in range(3):
    graph.find_sink_side()
    for i, more in enumerate(rng.integers(0, 5, len(edges)).tolist()):
      graph.capacity[edges[i]] += more
      room[i] += more
    again = FlowGraph(8)
    for (a, b), capacity in zip(ends, room, strict=True):
      again.add_edge(a, b, capacity)
    assert graph.find_sink_side() == again.find_sink_side()
