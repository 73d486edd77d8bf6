"""Cuts a traced training step into programs that compute and that send.

A program that computes what a collective sends ends there. Another thread can
then send it while the next program computes what is sent next. Results that
depend on a collective are computed after all that is to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxmotion import program
from jaxmotion.hosts import _sending, _stage_run

# Collectives of fewer bytes travel with the next one, if they can.
_MIN_GROUP_BYTES = 1 << 16
# Arrays of no more elements are computed again rather than handed on.
_MAX_SMALL = 16
# Other names of the same elements: whoever reads them makes them anew.
_NAMES = frozenset(
  "assert_replicated expand_dims pcast pvary reshape squeeze".split()
)
_FILLS = frozenset("broadcast_in_dim iota".split())
_SUMS = frozenset("psum psum2 psum_invariant".split())


class Stage(NamedTuple):
  """Describes one program of a step.

  Attributes:
    run: function from arrays, in the order of `reads`, to those of `makes`.
    reads: numbers of the arrays that the program takes.
    makes: numbers of the arrays that it returns.
    sends: whether it sends.
    is_symmetric: whether all it sends is sums or swaps of two workers, which
      are the same in any order of the workers.
  """

  run: Callable[..., Any]
  reads: tuple[int, ...]
  makes: tuple[int, ...]
  sends: bool
  is_symmetric: bool


class Stages(NamedTuple):
  """Lists the programs of a step, in an order in which they can run.

  Attributes:
    programs: the programs.
    inputs: numbers of the step's arguments.
    outputs: numbers of the step's results.
    constants: arrays of the step's text, by their numbers.
  """

  programs: tuple[Stage, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  constants: dict[int, Any]


def cut_at_collectives(
  closed: Any, mesh: Mesh, backend: str = "cpu"
) -> Stages | None:
  """Cuts a traced step at the collectives of its maps over all of a mesh."""
  # backend: whose branch of `lax.platform_dependent` sends. The result is None
  # of a step that sends nothing, has effects, or returns a constant or an
  # argument as it is.
  cut = _Cut(closed, mesh, backend)
  return cut.make_stages() if cut.is_possible else None


class _Cut:
  """Assigns each node of a step to a stage."""

  # Let there be K groups of collectives. Stage 2 g computes what group g sends,
  # and stage 2 g + 1 sends it. Stage 2 K + 2 computes what waits for no group
  # and no group waits for. Stage 2 K + 2 + g computes what follows from group
  # g.

  def __init__(self, closed: Any, mesh: Mesh, backend: str):
    self._mesh = mesh
    self._top = program.flatten(closed)
    self._nodes: list[_stage_run.Node] = []
    self._origin: dict[program.Value, program.Operand] = {}
    for step in self._top.steps:
      if step.name == "shard_map":
        self._add_map(step, backend)
      else:
        self._nodes.append(_stage_run.Node(None, step))
    self._maker = {v: i for i, n in enumerate(self._nodes) for v in n.outs}
    self._reads = [self._resolve_all(node) for node in self._nodes]
    self._is_free = self._find_free()
    self._is_late = self._find_late()
    self._groups = self._group_collectives()
    self._stage_of: dict[int, int] = {}
    outputs = self._top.outputs
    made = all(
      isinstance(v, program.Value) and v in self._maker for v in outputs
    )
    effects = any(program.has_effects(n.step.eqn) for n in self._nodes)
    self.is_possible = bool(self._groups) and made and not effects
    if self.is_possible:
      self._assign_stages()

  def make_stages(self) -> Stages:
    """Returns the programs of the stages that have any node."""
    outputs = [v for v in self._top.outputs if isinstance(v, program.Value)]
    numbers: dict[program.Value, int] = {}

    def number(value: program.Value) -> int:
      return numbers.setdefault(value, len(numbers))

    inputs = tuple(map(number, self._top.inputs))
    constants = {number(v): a for v, a in self._top.constants.items()}
    last = max(self._stage_of.values())
    runs: dict[int, _stage_run.StageRun] = {}
    makes: dict[int, list[program.Value]] = {}
    made_last = [v for v in outputs if self._is_free[self._maker[v]]]
    in_order = _place_first(self._top.inputs)
    for stage in sorted(set(self._stage_of.values())):
      own = [i for i, s in self._stage_of.items() if s == stage]
      wanted = made_last if stage == last else []
      nodes, reads = self._collect(own, wanted, stage)
      # JAX gives the buffers of donated arguments to results of the same kind
      # in order. So a stage has the arguments and results of the step first, in
      # the order of the step. In another order, a parameter would be written
      # where another one is still read, and be copied before.
      reads.sort(key=in_order)
      runs[stage] = _stage_run.StageRun(nodes, reads, self._mesh, self._origin)
      makes[stage] = list(wanted)
    asked = [v for run in runs.values() for v in run.reads]
    for value in dict.fromkeys(asked + outputs):
      index = self._maker.get(value)
      if index is not None and value not in made_last:
        makes[self._stage_of[index]].append(value)
    for values in makes.values():
      values.sort(key=_place_first(outputs))
    programs = []
    for stage, run in runs.items():
      own = [i for i, s in self._stage_of.items() if s == stage]
      sent = [self._nodes[i] for i in own if self._is_collective(i)]
      programs.append(
        Stage(
          run.bind(makes[stage]),
          tuple(map(number, run.reads)),
          tuple(map(number, makes[stage])),
          bool(sent),
          bool(sent) and all(_is_symmetric(n.step) for n in sent),
        )
      )
    return Stages(
      tuple(programs), inputs, tuple(map(number, outputs)), constants
    )

  def _add_map(self, step: program.Step, backend: str) -> None:
    """Adds the steps of a map, and one that hands out each of its results."""
    body = program.flatten(
      step.params["jaxpr"], calls="sending", backend=backend
    )
    home = _stage_run.Map(step, body)
    self._origin.update(zip(body.inputs, step.ins, strict=True))
    self._nodes += [_stage_run.Node(home, inner) for inner in body.steps]
    for i, (inner, outer) in enumerate(
      zip(body.outputs, step.outs, strict=True)
    ):
      self._nodes.append(
        _stage_run.Node(home, step, _stage_run.Leave(i, inner, outer))
      )

  def _resolve(self, operand: program.Operand) -> program.Operand:
    while isinstance(operand, program.Value) and operand in self._origin:
      operand = self._origin[operand]
    return operand

  def _resolve_all(self, node: _stage_run.Node) -> list[program.Value]:
    """Returns the values that a node reads, as they are outside of its map."""
    resolved = map(self._resolve, node.reads)
    return [v for v in resolved if isinstance(v, program.Value)]

  def _is_collective(self, index: int) -> bool:
    node = self._nodes[index]
    return node.leave is None and program.is_sending(node.step.eqn)

  def _find_free(self) -> list[bool]:
    """Tells which nodes whoever needs them runs anew."""
    free: list[bool] = []
    for i, node in enumerate(self._nodes):
      if node.leave is not None or self._is_collective(i):
        free.append(False)
        continue
      name, reads = node.step.name, self._reads[i]
      is_small = all(v.size <= _MAX_SMALL for v in (*reads, *node.outs))
      makers = [self._maker.get(v) for v in reads]
      is_known = all(m is None or free[m] for m in makers)
      # A worker has another index in another order of the devices.
      is_plain = name not in (
        *program.LOOPS,
        *program.CALLS,
        "axis_index",
      )
      free.append(
        name in _NAMES
        or (is_known and is_plain and (is_small or name in _FILLS))
      )
    return free

  def _group_collectives(self) -> list[list[int]]:
    """Returns the collectives that are sent together, in order."""
    # Those of a group do not depend on one another. What needs no local work is
    # sent first: a delayed gradient, beside the computation of the next one.
    is_late = self._is_late
    groups: list[list[int]] = []
    self._dep = [0] * len(self._nodes)
    sizes: list[int] = []
    for i in sorted(range(len(self._nodes)), key=is_late.__getitem__):
      makers = [self._maker.get(v) for v in self._reads[i]]
      self._dep[i] = max([self._dep[m] for m in makers if m is not None] + [0])
      if not self._is_collective(i):
        continue
      nbytes = sum(
        program.array_bytes(v.aval) for v in self._nodes[i].step.reads
      )
      joins = (
        bool(groups)
        and self._dep[i] < len(groups)
        and min(sizes[-1], nbytes) < _MIN_GROUP_BYTES
        and is_late[i] == is_late[groups[-1][0]]
      )
      if not joins:
        groups.append([])
        sizes.append(0)
      groups[-1].append(i)
      sizes[-1] += nbytes
      self._dep[i] = len(groups)
    return groups

  def _find_late(self) -> list[bool]:
    """Tells which nodes are of a map that sends nothing, or depend on one."""
    sends = {
      id(node.home)
      for i, node in enumerate(self._nodes)
      if self._is_collective(i)
    }
    late: list[bool] = []
    for node, reads in zip(self._nodes, self._reads, strict=True):
      is_work = node.home is not None and id(node.home) not in sends
      makers = [self._maker.get(v) for v in reads]
      late.append(is_work or any(late[m] for m in makers if m is not None))
    return late

  def _assign_stages(self) -> None:
    count = len(self._groups)
    stage_of = self._stage_of
    has_delay = not self._is_late[self._groups[0][0]]
    for g, members in enumerate(self._groups, 1):
      for i in members:
        stage_of[i] = 2 * g + 1
      for i in self._ancestors(members):
        if not self._is_free[i]:
          stage_of.setdefault(i, 2 * g)
    self._assign_received()
    values = [v for v in self._top.outputs if isinstance(v, program.Value)]
    makers = [self._maker.get(v) for v in values]
    made = [i for i in makers if i is not None]
    alive = self._ancestors(made, also=True)
    early = self._ancestors([i for i in made if not self._dep[i]], also=True)
    after = 2 * count + 2
    for i in sorted(alive):
      if i in stage_of or self._is_free[i]:
        continue
      if self._dep[i]:
        stage_of[i] = self._find_home(i, after) or after + self._dep[i]
      elif i in early:
        before = [stage_of[m] for m in self._real_makers(i)]
        stage_of[i] = max([2, *before])
        if has_delay and self._is_late[i]:
          stage_of[i] = after
    readers: dict[int, int] = {}
    for i in sorted(alive, reverse=True):
      if not self._is_free[i] and i not in stage_of:
        stage = readers.get(i, after + count)
        # What a program that sends reads besides is computed before it.
        sending = stage % 2 and stage < after
        stage_of[i] = stage - 1 if sending else stage
      if i in stage_of:
        for m in self._real_makers(i):
          readers[m] = min(readers.get(m, stage_of[i]), stage_of[i])

  def _find_home(self, index: int, after: int) -> int | None:
    """Returns the program that makes a result of a map before others follow."""
    # Another program would copy it, and none could write it in place.
    if self._nodes[index].leave is None:
      return None
    makers = [self._stage_of.get(m, after) for m in self._real_makers(index)]
    last = max(makers, default=after)
    return last if last < after and not last % 2 else None

  def _assign_received(self) -> None:
    """Assigns what a collective's own program computes behind it."""
    for i, node in enumerate(self._nodes):
      if (
        node.step.params.get("name") != _sending.RECEIVED
        or node.leave is not None
      ):
        continue
      for j in self._ancestors([i], also=True):
        if self._dep[j] == self._dep[i] and not self._is_free[j]:
          self._stage_of.setdefault(j, 2 * self._dep[i] + 1)

  def _real_makers(self, index: int) -> Iterator[int]:
    """Yields the nodes whose results a node reads, free ones seen through."""
    todo = list(self._reads[index])
    seen = set()
    while todo:
      maker = self._maker.get(todo.pop())
      if maker is None or maker in seen:
        continue
      seen.add(maker)
      if self._is_free[maker]:
        todo += self._reads[maker]
      else:
        yield maker

  def _ancestors(self, nodes: list[int], also: bool = False) -> set[int]:
    """Returns the nodes that others depend on, with themselves if `also`."""
    found: set[int] = set(nodes) if also else set()
    todo = list(nodes)
    while todo:
      for value in self._reads[todo.pop()]:
        maker = self._maker.get(value)
        if maker is not None and maker not in found:
          found.add(maker)
          todo.append(maker)
    return found

  def _collect(
    self, own: list[int], wanted: list[program.Value], stage: int
  ) -> tuple[list[_stage_run.Node], list[program.Value]]:
    """Returns the nodes of a stage in order, and what it reads."""
    nodes, reads = set(own), dict[program.Value, None]()
    todo = [v for i in own for v in self._reads[i]] + list(wanted)
    while todo:
      value = todo.pop()
      maker = self._maker.get(value)
      if maker is not None and maker in nodes:
        continue
      if maker is not None and self._is_free[maker]:
        nodes.add(maker)
        todo += self._reads[maker]
      elif maker is None or self._stage_of[maker] != stage:
        reads[value] = None
    return [self._nodes[i] for i in sorted(nodes)], list(reads)


def _place_first(
  values: Iterable[program.Value],
) -> Callable[[program.Value], int]:
  """Returns a key that sorts these values first, in their order."""
  places = {value: i for i, value in enumerate(values)}
  return lambda value: places.get(value, len(places))


def _is_symmetric(step: program.Step) -> bool:
  if step.name == "ppermute":
    return sorted(step.params["perm"]) == [(0, 1), (1, 0)]
  groups = step.params.get("axis_index_groups")
  return step.name in _SUMS and groups is None
