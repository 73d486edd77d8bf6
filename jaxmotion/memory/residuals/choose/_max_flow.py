"""Minimum cuts of small directed graphs, by Dinitz's maximum flow.

Written by hand because scipy 1.17.1's `maximum_flow` silently returned 0 for
a capacity of 2**40, and edges that must not be cut need a capacity above any
sum of costs. Graphs have two nodes for each array of a traced function, so
plain Python is fast enough.
"""

from collections import deque

# Capacity of an edge that must not be cut: more than any sum of costs.
UNCUTTABLE = 1 << 100


class FlowGraph:
  """A directed graph with capacities; nodes 0 and 1 are source and sink.

  Edge e leads to node `_head[e]` and can carry `_capacity[e]` more; its
  reverse is edge `e ^ 1`. The sum of the two capacities never changes, so the
  reverse edge's capacity is the flow that can be taken back.

  Args:
    nodes: number of nodes, source and sink included.
  """

  SOURCE, SINK = 0, 1

  def __init__(self, nodes: int):
    self._edges: list[list[int]] = [[] for _ in range(nodes)]
    self._head: list[int] = []
    self._capacity: list[int] = []

  def add_edge(self, tail: int, head: int, capacity: int) -> None:
    """Adds an edge and its reverse, which has no capacity yet."""
    for node, other, room in ((tail, head, capacity), (head, tail, 0)):
      self._edges[node].append(len(self._head))
      self._head.append(other)
      self._capacity.append(room)

  def find_sink_side(self) -> set[int]:
    """Returns the sink's side of the minimum cut that is nearest to the sink.

    Of equal cuts the latest is wanted: what it saves lives for a shorter time.
    It consists of the nodes from which the sink can still be reached over
    edges with capacity left, found by a search backwards from the sink.

    References:
      Dinitz, *Algorithm for solution of a problem of maximum flow in a network
      with power estimation*, 1970.
    """
    while (level := self._find_levels()) is not None:
      self._push_blocking_flow(level)
    side = {self.SINK}
    queue = deque(side)
    while queue:
      for edge in self._edges[queue.popleft()]:
        other = self._head[edge]
        if other not in side and self._capacity[edge ^ 1] > 0:
          side.add(other)
          queue.append(other)
    return side

  def _find_levels(self) -> list[int] | None:
    """Returns each node's distance from the source, in edges with capacity.

    Returns:
      -1 for nodes that cannot be reached; None if the sink is one of them.
    """
    level = [-1] * len(self._edges)
    level[self.SOURCE] = 0
    queue = deque([self.SOURCE])
    while queue:
      node = queue.popleft()
      for edge in self._edges[node]:
        other = self._head[edge]
        if level[other] < 0 and self._capacity[edge] > 0:
          level[other] = level[node] + 1
          queue.append(other)
    return level if level[self.SINK] >= 0 else None

  def _push_blocking_flow(self, level: list[int]) -> None:
    """Pushes flow along shortest paths until none of them has capacity left.

    A depth-first search without recursion. `tried[node]` counts the edges of a
    node that lead nowhere at this level: no edge is tried twice, which is what
    bounds the number of steps.
    """
    tried = [0] * len(self._edges)
    path: list[int] = []
    node = self.SOURCE
    while True:
      if node == self.SINK:
        flow = min(self._capacity[edge] for edge in path)
        for edge in path:
          self._capacity[edge] -= flow
          self._capacity[edge ^ 1] += flow
        path, node = [], self.SOURCE
      elif tried[node] < len(self._edges[node]):
        edge = self._edges[node][tried[node]]
        other = self._head[edge]
        if self._capacity[edge] > 0 and level[other] == level[node] + 1:
          path.append(edge)
          node = other
        else:
          tried[node] += 1
      elif path:
        node = self._head[path.pop() ^ 1]
        tried[node] += 1
      else:
        return
