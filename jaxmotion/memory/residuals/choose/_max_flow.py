"""The least that must be paid to cut a sink from a source."""

from collections import deque

# More than any sum of bytes.
ENDLESS = 1 << 62


class Graph:
  """Nodes 0 and 1 are the source and the sink; others are added.

  Args:
    nodes: number of nodes.
  """

  SOURCE, SINK = 0, 1

  def __init__(self, nodes: int):
    self._edges: list[list[int]] = [[] for _ in range(nodes)]
    self._to: list[int] = []
    self._room: list[int] = []

  def edge(self, a: int, b: int, capacity: int) -> None:
    """Adds an edge from `a` to `b`."""
    for node, other, room in ((a, b, capacity), (b, a, 0)):
      self._edges[node].append(len(self._to))
      self._to.append(other)
      self._room.append(room)

  def cut(self) -> set[int]:
    """Returns the nodes on the sink's side of the minimum cut nearest to it.

    Reference: Dinitz, Algorithm for solution of a problem of maximum flow in
    a network with power estimation, 1970.
    """
    while (level := self._levels()) is not None:
      self._saturate(level)
    side = {self.SINK}
    queue = deque(side)
    while queue:
      for edge in self._edges[queue.popleft()]:
        other = self._to[edge]
        if other not in side and self._room[edge ^ 1] > 0:
          side.add(other)
          queue.append(other)
    return side

  def _levels(self) -> list[int] | None:
    """Steps from the source over edges with room; None: no way to the sink."""
    level = [-1] * len(self._edges)
    level[self.SOURCE] = 0
    queue = deque([self.SOURCE])
    while queue:
      node = queue.popleft()
      for edge in self._edges[node]:
        other = self._to[edge]
        if level[other] < 0 and self._room[edge] > 0:
          level[other] = level[node] + 1
          queue.append(other)
    return level if level[self.SINK] >= 0 else None

  def _saturate(self, level: list[int]) -> None:
    """Sends all it can along shortest ways."""
    tried = [0] * len(self._edges)
    path: list[int] = []
    node = self.SOURCE
    while True:
      if node == self.SINK:
        room = min(self._room[edge] for edge in path)
        for edge in path:
          self._room[edge] -= room
          self._room[edge ^ 1] += room
        path, node = [], self.SOURCE
      elif tried[node] < len(self._edges[node]):
        edge = self._edges[node][tried[node]]
        other = self._to[edge]
        if self._room[edge] > 0 and level[other] == level[node] + 1:
          path.append(edge)
          node = other
        else:
          tried[node] += 1
      elif path:
        node = self._to[path.pop() ^ 1]
        tried[node] += 1
      else:
        return
