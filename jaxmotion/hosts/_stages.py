"""Cuts a traced training step into programs that compute and that send.

A program that computes what a collective sends ends there. Another thread can
then send it while the next program computes what is sent next. Results that
depend on a collective are computed after all that is to be sent.

A step whose exchange lasts longer than itself is cut into what the next step
needs, what is sent at once, and what is sent beside the steps that follow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, program
from jaxmotion.hosts import _sending

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


class Map(NamedTuple):
  """Describes a `shard_map` of the step, whose inner steps stages run apart."""

  step: program.Step  # The map, seen from outside.
  body: program.Program  # Its function, flat.

  @property
  def axis_names(self) -> frozenset[Any]:
    """Axes that the map is over, as the arrays inside tell."""
    return frozenset(self.body.inputs[0].aval.sharding.mesh.manual_axes)

  def stacked_axes(self, value: program.Value) -> tuple[Any, ...]:
    """Returns the axes over which a value of the inside may differ."""
    # Another program gets it with a leading axis of the workers along these.
    params, axes = self.step.params, self.axis_names
    if params["check_vma"]:
      axes = core.varying_axes(value.aval)
    return tuple(name for name in params["mesh"].axis_names if name in axes)


class MapResult(NamedTuple):
  """Describes a result of a map, as seen inside and outside of it."""

  position: int
  inner: program.Operand
  outer: program.Value


class Node(NamedTuple):
  """Describes a unit of work: one step, or a result that a map hands out."""

  own_map: Map | None  # The map that it is in; None outside of maps.
  step: program.Step  # The map itself if the node hands out a result.
  result: MapResult | None = None

  @property
  def reads(self) -> tuple[program.Value, ...]:
    """Values that the node reads."""
    if self.result is None:
      return self.step.reads
    inner = self.result.inner
    return (inner,) if isinstance(inner, program.Value) else ()

  @property
  def outs(self) -> tuple[program.Value, ...]:
    """Values that it makes."""
    return self.step.outs if self.result is None else (self.result.outer,)

  @property
  def sends(self) -> bool:
    """Whether it is a collective, or holds one."""
    return self.result is None and program.is_sending(self.step.eqn)

  def is_marked(self, name: str) -> bool:
    """Says whether it marks its result by a name."""
    return self.result is None and self.step.params.get("name") == name


@dataclasses.dataclass(eq=False)
class Stage:
  """Holds one of the programs that a training step is cut into."""

  nodes: Sequence[Node]  # In the order in which they run.
  reads: list[program.Value]  # Arguments, in their order.
  makes: list[program.Value]  # Results, in their order.
  sends: bool  # Whether a thread that sends dispatches it.
  # What each argument of a map's function is outside.
  outer_of: dict[program.Value, program.Operand]

  @property
  def is_symmetric(self) -> bool:
    """Whether all it sends is the same in any order of two workers."""
    return all(_is_symmetric(node.step) for node in self.nodes if node.sends)

  def run(self, *arrays: Any, mesh: Mesh | None = None) -> list[Any]:
    """Runs the stage; returns what it makes for later stages and the caller."""
    # mesh: the devices of its maps, maybe in another order; None: as traced.
    env: dict[program.Value, Any] = dict(zip(self.reads, arrays, strict=True))
    for _, group in itertools.groupby(self.nodes, lambda n: id(n.own_map)):
      nodes = list(group)
      own_map = nodes[0].own_map
      if own_map is None:
        program.evaluate([node.step for node in nodes], env)
      else:
        self._run_map(own_map, nodes, env, mesh or own_map.step.params["mesh"])
    return [env[value] for value in self.makes]

  def _run_map(
    self,
    own_map: Map,
    nodes: Sequence[Node],
    env: dict[program.Value, Any],
    mesh: Mesh,
  ) -> None:
    """Runs the stage's steps of one map in a map of their own; fills `env`."""
    # What other stages read of the inside has a leading axis of workers.
    params = own_map.step.params
    steps = [node.step for node in nodes if node.result is None]
    map_results = [node.result for node in nodes if node.result is not None]
    made = {v for step in steps for v in step.outs}
    read = dict.fromkeys(v for n in nodes for v in n.reads if v not in made)
    specs = dict(zip(own_map.body.inputs, params["in_specs"], strict=True))
    specs |= dict.fromkeys(own_map.body.constants, P())
    handed = [v for v in self.makes if v in made]

    def spec_of(value: program.Value) -> P:
      axes = own_map.stacked_axes(value)
      return P(axes) if axes else P()

    def run_own(*own: Any) -> tuple[list[Any], list[Any]]:
      """Returns the map's results, and rows for later programs."""
      inner: dict[program.Value, Any] = {}
      for value, x in zip(read, own, strict=True):
        is_row = value not in specs and own_map.stacked_axes(value)
        inner[value] = jnp.squeeze(x, 0) if is_row else x
      program.evaluate(steps, inner)
      results = [
        program.read_operand(inner, result.inner) for result in map_results
      ]
      rows = [
        jnp.expand_dims(inner[v], 0) if own_map.stacked_axes(v) else inner[v]
        for v in handed
      ]
      return results, rows

    outside = {v: self.outer_of.get(v, v) for v in read}
    operands = [program.read_operand(env, outside[v]) for v in read]
    results, rows = jax.shard_map(
      run_own,
      mesh=mesh,
      in_specs=tuple(specs[v] if v in specs else spec_of(v) for v in read),
      out_specs=(
        [params["out_specs"][result.position] for result in map_results],
        [spec_of(v) for v in handed],
      ),
      axis_names=own_map.axis_names,
      check_vma=params["check_vma"],
    )(*operands)
    env.update(
      (result.outer, x) for result, x in zip(map_results, results, strict=True)
    )
    env.update(zip(handed, rows, strict=True))


def _is_symmetric(step: program.Step) -> bool:
  """Says whether a collective is a sum or a swap of two workers."""
  if step.name == "ppermute":
    return sorted(step.params["perm"]) == [(0, 1), (1, 0)]
  groups = step.params.get("axis_index_groups")
  return step.name in _SUMS and groups is None


class Stages(NamedTuple):
  """Lists the programs of a step, in an order in which they can run."""

  programs: tuple[Stage, ...]
  inputs: tuple[program.Value, ...]  # The step's arguments.
  outputs: tuple[program.Value, ...]  # The step's results.
  constants: dict[program.Value, Any]  # Arrays of the step's text.


def cut_at_collectives(closed: Any) -> Stages | None:
  """Cuts a traced step at the collectives of its maps over all of a mesh."""
  # The result is None of a step that sends nothing, has effects, or returns a
  # constant or an argument as it is.
  cut = _Cut(closed)
  return cut.make_stages() if cut.assign_turns() else None


def cut_for_flight(closed: Any, own: Sequence[int]) -> Stages | None:
  """Cuts a traced step into what the next step needs, and all that sends."""
  # own: numbers of the results that the next step needs. The first program
  # makes them, and what is marked as computed. What follows from that is sent
  # last. A result that is an argument as it is belongs to no program. The
  # result is None if the first program would send, and of a step that has
  # effects or returns a constant.
  cut = _Cut(closed)
  return cut.make_stages() if cut.assign_flight(own) else None


class _Cut:
  """Assigns each node of a traced step to a stage, and makes the stages."""

  def __init__(self, closed: Any):
    """Lists the nodes of a traced step, and which reads whose results."""
    self._top = program.flatten(closed)
    self._constants = dict(self._top.constants)
    self._nodes: list[Node] = []
    self._outer_of: dict[program.Value, program.Operand] = {}
    for step in self._top.steps:
      if step.name == "shard_map":
        self._add_map(step)
      else:
        self._nodes.append(Node(None, step))
    # Positions of nodes, by the values that they make.
    self._maker = {v: i for i, n in enumerate(self._nodes) for v in n.outs}
    # As they are outside of maps.
    self._reads = [
      [v for v in map(self._resolve, n.reads) if isinstance(v, program.Value)]
      for n in self._nodes
    ]
    self._is_repeated = self._find_repeated()
    self._stage_of: dict[int, int] = {}
    self._sending: Sequence[int] = ()
    outputs = self._top.outputs
    self._outputs = [v for v in outputs if isinstance(v, program.Value)]
    has_effects = any(program.has_effects(n.step.eqn) for n in self._nodes)
    self._is_possible = len(self._outputs) == len(outputs) and not has_effects

  def make_stages(self) -> Stages:
    """Returns the programs of the stages that have any node."""
    outputs = self._outputs
    last = max(self._stage_of.values())
    stages: dict[int, Stage] = {}
    made_last = [
      v
      for v in outputs
      if v in self._maker and self._is_repeated[self._maker[v]]
    ]
    in_order = _place_first(self._top.inputs)
    for number in sorted(set(self._stage_of.values())):
      own = [i for i, s in self._stage_of.items() if s == number]
      wanted = made_last if number == last else []
      nodes, reads = self._collect(own, wanted, number)
      # JAX gives the buffers of donated arguments to results of the same kind
      # in order. So a stage has the arguments and results of the step first, in
      # the order of the step. In another order, a parameter would be written
      # where another one is still read, and be copied before.
      reads.sort(key=in_order)
      stages[number] = Stage(
        nodes, reads, list(wanted), number in self._sending, self._outer_of
      )
    asked = [v for stage in stages.values() for v in stage.reads]
    for value in dict.fromkeys(asked + outputs):
      index = self._maker.get(value)
      if index is not None and value not in made_last:
        stages[self._stage_of[index]].makes.append(value)
    for stage in stages.values():
      stage.makes.sort(key=_place_first(outputs))
    programs = tuple(stages.values())
    return Stages(programs, self._top.inputs, tuple(outputs), self._constants)

  def _add_map(self, step: program.Step) -> None:
    """Adds nodes for the steps inside of a map, and for each result of it."""
    body = program.flatten(step.params["jaxpr"], calls="sending", backend="cpu")
    own_map = Map(step, body)
    self._outer_of.update(zip(body.inputs, step.ins, strict=True))
    self._constants |= body.constants
    self._nodes += [Node(own_map, inner) for inner in body.steps]
    pairs = zip(body.outputs, step.outs, strict=True)
    self._nodes += [
      Node(own_map, step, MapResult(i, inner, outer))
      for i, (inner, outer) in enumerate(pairs)
    ]

  def _resolve(self, operand: program.Operand) -> program.Operand:
    """Returns what an operand is outside of maps."""
    while isinstance(operand, program.Value) and operand in self._outer_of:
      operand = self._outer_of[operand]
    return operand

  def _find_repeated(self) -> list[bool]:
    """Finds nodes so cheap that every stage runs them anew for itself."""
    repeated: list[bool] = []
    for node, reads in zip(self._nodes, self._reads, strict=True):
      if node.result is not None or node.sends:
        repeated.append(False)
        continue
      name = node.step.name
      is_small = all(v.size <= _MAX_SMALL for v in (*reads, *node.outs))
      makers = [self._maker.get(v) for v in reads]
      is_known = all(m is None or repeated[m] for m in makers)
      # A worker has another index in another order of the devices.
      is_plain = name not in (*program.LOOPS, *program.CALLS, "axis_index")
      is_cheap = is_small or name in _FILLS
      repeated.append(name in _NAMES or (is_known and is_plain and is_cheap))
    return repeated

  def _group_collectives(self) -> list[list[int]]:
    """Groups collectives that are sent together, in the order of sending."""
    # Those of a group do not depend on one another. What needs no local work is
    # sent first: a delayed gradient, beside the computation of the next one.
    is_late = self._is_late
    groups: list[list[int]] = []
    # The last group that a node waits for; groups count from 1.
    self._last_group = [0] * len(self._nodes)
    sizes: list[int] = []
    for i in sorted(range(len(self._nodes)), key=is_late.__getitem__):
      makers = [self._maker.get(v) for v in self._reads[i]]
      self._last_group[i] = max(
        [self._last_group[m] for m in makers if m is not None] + [0]
      )
      if not self._nodes[i].sends:
        continue
      reads = self._nodes[i].step.reads
      nbytes = sum(program.array_bytes(v.aval) for v in reads)
      joins = (
        bool(groups)
        and self._last_group[i] < len(groups)
        and min(sizes[-1], nbytes) < _MIN_GROUP_BYTES
        and is_late[i] == is_late[groups[-1][0]]
      )
      if not joins:
        groups.append([])
        sizes.append(0)
      groups[-1].append(i)
      sizes[-1] += nbytes
      self._last_group[i] = len(groups)
    return groups

  def _find_late(self) -> list[bool]:
    """Finds nodes of maps that send nothing, and all that depends on them."""
    # These are the local work of a step: gradients, and what follows from them.
    sends = {id(node.own_map) for node in self._nodes if node.sends}
    sends.add(id(None))  # What is outside of maps is of no map.
    return self._find_followers(id(n.own_map) not in sends for n in self._nodes)

  def assign_turns(self) -> bool:
    """Assigns a step to stages that send in turn; says whether it sends."""
    # Let there be K groups of collectives. Stage 2 g computes what group g
    # sends, and stage 2 g + 1 sends it. Stage 2 K + 2 computes what waits for
    # no group and no group waits for. Stage 2 K + 2 + g computes what follows
    # from group g.
    self._is_late = self._find_late()
    self._groups = self._group_collectives()
    is_made = all(v in self._maker for v in self._outputs)
    if not (self._is_possible and self._groups and is_made):
      return False
    count = len(self._groups)
    self._sending = range(3, 2 * count + 2, 2)
    stage_of = self._stage_of
    # A delayed gradient: the first group waits for no map of this step.
    has_delay = not self._is_late[self._groups[0][0]]
    for g, members in enumerate(self._groups, 1):
      for i in members:
        stage_of[i] = 2 * g + 1
      for i in self._leading_to(v for m in members for v in self._reads[m]):
        if not self._is_repeated[i]:
          stage_of.setdefault(i, 2 * g)
    self._assign_received()
    alive = self._leading_to(self._outputs)
    early = self._leading_to(
      v for v in self._outputs if not self._last_group[self._maker[v]]
    )
    after = 2 * count + 2
    for i in sorted(alive):
      if i in stage_of or self._is_repeated[i]:
        continue
      if self._last_group[i]:
        stage_of[i] = (
          self._find_map_stage(i, after) or after + self._last_group[i]
        )
      elif i in early:
        before = [stage_of[m] for m in self._real_makers(i)]
        stage_of[i] = max([2, *before])
        if has_delay and self._is_late[i]:
          stage_of[i] = after
    # What is left is computed for its first reader.
    readers: dict[int, int] = {}
    for i in sorted(alive, reverse=True):
      if not self._is_repeated[i] and i not in stage_of:
        stage = readers.get(i, after + count)
        # What a program that sends reads besides is computed before it.
        sending = stage % 2 and stage < after
        stage_of[i] = stage - 1 if sending else stage
      if i in stage_of:
        for m in self._real_makers(i):
          readers[m] = min(readers.get(m, stage_of[i]), stage_of[i])
    return True

  def _find_map_stage(self, index: int, after: int) -> int | None:
    """Returns the stage that has computed a map's result already, or None."""
    # Another program would copy it, and none could write it in place.
    if self._nodes[index].result is None:
      return None
    makers = [self._stage_of.get(m, after) for m in self._real_makers(index)]
    last = max(makers, default=after)
    return last if last < after and not last % 2 else None

  def _assign_received(self) -> None:
    """Lets a sending stage compute what is marked as received, behind it."""
    for i, node in enumerate(self._nodes):
      if not node.is_marked(_sending.RECEIVED):
        continue
      for j in self._leading_to(node.outs):
        if (
          self._last_group[j] == self._last_group[i]
          and not self._is_repeated[j]
        ):
          self._stage_of.setdefault(j, 2 * self._last_group[i] + 1)

  def assign_flight(self, own: Sequence[int]) -> bool:
    """Assigns a step to three stages; says whether that is possible."""
    # Stage 0 computes what the next step needs. Stage 2 makes the results that
    # follow from what stage 0 hands over, and stage 1 all others.
    self._outputs = outputs = [
      self._find_argument(v) if v in self._maker else v for v in self._outputs
    ]
    marked = [node.is_marked(_sending.COMPUTED) for node in self._nodes]
    handed = itertools.compress(self._nodes, marked)
    follows = self._find_followers(marked)
    made = [v for v in outputs if v in self._maker]
    needed = self._leading_to(
      [outputs[i] for i in own] + [v for node in handed for v in node.outs]
    )
    early = self._leading_to(v for v in made if not follows[self._maker[v]])
    alive = self._leading_to(made)
    for i in alive:
      # Another program would copy a result of a map that is made already.
      makers = set(self._real_makers(i))
      if self._nodes[i].result is not None and makers and makers <= needed:
        needed.add(i)
    self._sending = (1, 2)
    self._stage_of = {
      i: 0 if i in needed else 1 if i in early else 2
      for i in sorted(alive)
      if not self._is_repeated[i]
    }
    sends = any(self._nodes[i].sends for i in needed)
    return self._is_possible and bool(self._stage_of) and not sends

  def _find_argument(self, value: program.Value) -> program.Value:
    """Returns the argument that a map hands out as it is, or the value."""
    own_map, step, result = self._nodes[self._maker[value]]
    if (
      own_map is None
      or result is None
      or result.inner not in own_map.body.inputs
    ):
      return value
    index = own_map.body.inputs.index(result.inner)
    out_spec = step.params["out_specs"][result.position]
    outer = step.ins[index]
    is_same = step.params["in_specs"][index] == out_spec
    return outer if is_same and isinstance(outer, program.Value) else value

  def _find_followers(self, marked: Iterable[bool]) -> list[bool]:
    """Finds nodes that are marked, or depend on one that is."""
    follows: list[bool] = []
    for is_marked, reads in zip(marked, self._reads, strict=True):
      makers = [self._maker.get(v) for v in reads]
      follows.append(
        is_marked or any(follows[m] for m in makers if m is not None)
      )
    return follows

  def _real_makers(self, index: int) -> Iterator[int]:
    """Yields the nodes whose results a node reads, through repeated ones."""
    todo = list(self._reads[index])
    seen = set()
    while todo:
      maker = self._maker.get(todo.pop())
      if maker is None or maker in seen:
        continue
      seen.add(maker)
      if self._is_repeated[maker]:
        todo += self._reads[maker]
      else:
        yield maker

  def _leading_to(self, values: Iterable[program.Value]) -> set[int]:
    """Returns all nodes that values depend on, directly or not."""
    nodes: set[int] = set()
    todo = [values]
    while todo:
      for value in todo.pop():
        maker = self._maker.get(value)
        if maker is not None and maker not in nodes:
          nodes.add(maker)
          todo.append(self._reads[maker])
    return nodes

  def _collect(
    self, own: list[int], wanted: list[program.Value], stage: int
  ) -> tuple[list[Node], list[program.Value]]:
    """Returns the nodes of a stage, with repeated ones, and what it reads."""
    nodes, reads = set(own), dict[program.Value, None]()
    todo = [v for i in own for v in self._reads[i]] + list(wanted)
    while todo:
      value = todo.pop()
      maker = self._maker.get(value)
      if maker is not None and maker in nodes:
        continue
      if maker is not None and self._is_repeated[maker]:
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
