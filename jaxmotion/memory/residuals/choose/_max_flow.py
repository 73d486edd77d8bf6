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

  Edge e leads to node `_head[e]` and can carry `capacity[e]` more; its
  reverse is edge `e ^ 1`. The sum of the two capacities never changes, so the
  reverse edge's capacity is the flow that can be taken back.

  A flow stays one when capacities grow. So after a search, edges may be given
  more capacity, and the next search goes on from the flow that was found.
  """

  SOURCE, SINK = 0, 1

  def __init__(self, nodes: int):
    self._edges: list[list[int]] = [[] for _ in range(nodes)]
    self._head: list[int] = []
    # What each edge can carry more. A copy restores the flow of a search.
    self.capacity: list[int] = []

  def add_edge(self, tail: int, head: int, capacity: int) -> int:
    """Adds an edge and its reverse, which has no capacity yet."""
    for node, other, room in ((tail, head, capacity), (head, tail, 0)):
      self._edges[node].append(len(self._head))
      self._head.append(other)
      self.capacity.append(room)
    return len(self._head) - 2

  def find_sink_side(self) -> set[int]:
    """Returns the sink's side of the minimum cut nearest to the sink."""
    # Of equal cuts the latest is wanted: what it saves lives for a shorter
    # time. It consists of the nodes from which the sink can still be reached
    # over edges with capacity left, found by a search backwards from the sink.
    # References: Dinitz, *Algorithm for solution of a problem of maximum flow
    # in a network with power estimation*, 1970.
    while (level := self._find_levels())[self.SOURCE] >= 0:
      self._push_blocking_flow(level)
    return {node for node, distance in enumerate(level) if distance >= 0}

  def _find_levels(self) -> list[int]:
    """Returns each node's distance to the sink, in edges with capacity."""
    edges, head, capacity = self._edges, self._head, self.capacity
    level = [-1] * len(edges)
    level[self.SINK] = 0
    queue = deque([self.SINK])
    while queue:
      node = queue.popleft()
      distance = level[node] + 1
      for edge in edges[node]:
        other = head[edge]
        if level[other] < 0 and capacity[edge ^ 1]:
          level[other] = distance
          if other == self.SOURCE:
            return level
          queue.append(other)
    return level

  def _push_blocking_flow(self, level: list[int]) -> None:
    """Pushes flow along shortest paths until none of them has capacity left."""
    # A depth-first search without recursion. `tried[node]` counts the edges of
    # a node that lead nowhere at this level: no edge is tried twice, which is
    # what bounds the number of steps. After a push, the search goes on from the
    # first edge that is full.
    edges, head, capacity = self._edges, self._head, self.capacity
    tried = [0] * len(edges)
    path: list[int] = []
    node = self.SOURCE
    while True:
      if node == self.SINK:
        flow = min(capacity[edge] for edge in path)
        for edge in path:
          capacity[edge] -= flow
          capacity[edge ^ 1] += flow
        full = next(i for i, edge in enumerate(path) if not capacity[edge])
        node = head[path[full] ^ 1]
        del path[full:]
        continue
      own, nearer = edges[node], level[node] - 1
      for i in range(tried[node], len(own)):
        edge = own[i]
        if capacity[edge] and level[head[edge]] == nearer:
          tried[node] = i
          path.append(edge)
          node = head[edge]
          break
      else:
        tried[node] = len(own)
        if not path:
          return
        node = head[path.pop() ^ 1]
        tried[node] += 1
