"""The ledger of a compiled program: collectives in the compiler's own text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmotion import core, program
from jaxmotion.wire import _ledger

_OPS = {op.replace("_", "-"): op for op in _ledger.OPS}
_UNCOUNTABLE = ("ragged-all-to-all", "collective-broadcast", "send")

_PAIRS = re.compile(r"source_target_pairs=\{(.*?\})\}")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})?\}")
_IOTA = re.compile(
  r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")

_Groups = frozenset[frozenset[int]]


@core.declare(
  branch=core.optional(_ledger.COUNT),
  while_trips=core.optional(_ledger.COUNT),
  mesh=core.optional(core.instance(Mesh, "a jax.sharding.Mesh")),
)
def compiled_bytes(
  compiled: jax.stages.Compiled,
  *,
  branch: int | None = None,
  while_trips: int | None = None,
  mesh: Mesh | None = None,
) -> _ledger.Ledger:
  """Counts the bytes that a compiled program sends.

  The program's text is read: the dtypes and shapes are those that travel,
  whatever the traced function asked for. On the CPU backend, for one, a
  bfloat16 `psum` is a float32 all_reduce.

  Args:
    compiled: The program, `jax.jit(fn).lower(*args).compile()`.
    branch: Index of the branch that every conditional with a collective
      takes. By default each takes the branch that sends the MOST bytes.
    while_trips: Trips of every loop with a collective whose number of trips
      the program does not state.
    mesh: The mesh that the program runs on. Its axes name groups of devices
      where the text has no axes.

  Returns:
    The ledger, in bytes one worker sends. Its axes are `()` where the text
    gives devices instead of mesh axes and there is no `mesh`.

  Raises:
    TypeError: `compiled` is something else, such as a lowered program, or
      `mesh` is no mesh.
    ValueError: The program has no text. A loop with a collective states no
      number of trips, and `while_trips` is not given. A conditional has no
      branch of that index. The bytes of a collective cannot be told.

  Example:
    >>> import jax
    >>> program = jax.jit(lambda x: 2 * x).lower(1.0).compile()
    >>> compiled_bytes(program).total_bytes
    0.0
  """
  # The text of a lowered program is in another language, which has no bytes.
  if isinstance(compiled, jax.stages.Lowered) or not hasattr(
    compiled, "as_text"
  ):
    raise TypeError(
      "`compiled` must be `jax.jit(fn).lower(*args).compile()`, got "
      f"{compiled!r:.200}."
    )
  text = compiled.as_text()
  if text is None:
    raise ValueError(f"`compiled` must have a text, got {compiled!r}.")
  module = program.parse_hlo(text)
  counter = _MoveCounter(module, branch, while_trips, mesh)
  return _ledger.Ledger(tuple(counter.count_computation(module.entry)))


@dataclasses.dataclass
class _MoveCounter:
  """Counts the moves of a compiled program, each computation once."""

  module: program.HloModule
  branch: int | None
  while_trips: int | None
  mesh: Mesh | None
  counted: dict[str, list[_ledger.Move]] = dataclasses.field(
    default_factory=dict
  )

  @functools.cached_property
  def devices(self) -> int:
    """Number of devices that the program runs on."""
    said = r"\b(?:num_partitions|replica_count)=(\d+)"
    return math.prod(map(int, re.findall(said, self.module.header)))

  def count_computation(self, name: str) -> list[_ledger.Move]:
    """Returns the moves of one run of a computation, counted once by name."""
    if name not in self.counted:
      body = self.module.computations[name]
      self.counted[name] = [
        move
        for instruction in body.values()
        for move in self._count_instruction(instruction, body)
      ]
    return self.counted[name]

  def _count_instruction(
    self,
    instruction: program.Instruction,
    body: Mapping[str, program.Instruction],
  ) -> list[_ledger.Move]:
    """Returns the moves of one instruction, and of what it calls."""
    base = instruction.opcode.removesuffix("-start")
    if base in _OPS:
      return self._count_collective(instruction, _OPS[base], body)
    _check_countable(instruction, base)
    called = instruction.called
    if instruction.opcode == "while":
      return self._count_while(instruction)
    inner = [
      self.count_computation(n) for names in called.values() for n in names
    ]
    if instruction.opcode == "conditional":
      if "true_computation" in called:  # Indexed as in JAX: false is 0.
        order = ("false_computation", "true_computation")
        inner = [self.count_computation(called[key][0]) for key in order]
      said = f"conditional %{instruction.name}"
      return _ledger.pick_branch(inner, self.branch, said)
    return [move for moves in inner for move in moves]

  def _count_while(
    self, instruction: program.Instruction
  ) -> list[_ledger.Move]:
    """Returns the moves of all trips of a loop."""
    called, stated = instruction.called, instruction.known_trips
    trips = self.while_trips if stated is None else stated
    body = self.count_computation(called["body"][0])
    condition = self.count_computation(called["condition"][0])
    said = f"loop %{instruction.name}"
    return _ledger.repeat_loop(body, condition, trips, said)

  def _count_collective(
    self,
    instruction: program.Instruction,
    op: str,
    body: Mapping[str, program.Instruction],
  ) -> list[_ledger.Move]:
    """Returns a move for each operand of a collective in `body`."""
    attributes = instruction.attributes
    axes, workers = _parse_group(attributes, self.devices, self.mesh)
    operands = [
      (array.dtype, array.element_bits * array.size)
      for name in instruction.operand_names
      for array in body[name].arrays
    ]
    if op == "all_to_all" and operands:
      # The tuple form has one operand for each worker to send to.
      operands = [(operands[0][0], sum(bits for _, bits in operands))]
    return [
      _ledger.Move(op, axes, workers, dtype, -(-bits // 8), 1)
      for dtype, bits in operands
    ]


def _check_countable(instruction: program.Instruction, base: str) -> None:
  """Raises if an instruction sends bytes that its text does not tell."""
  # To count it as 0 bytes would be wrong without a word.
  on_host = "is_host_transfer=true" in instruction.attributes
  if base in _UNCOUNTABLE and not on_host:
    raise ValueError(
      "`compiled` must use collectives of known size, got"
      f" {instruction.opcode} in %{instruction.name}."
    )


def _parse_group(
  attributes: str, devices: int, mesh: Mesh | None
) -> tuple[tuple[str, ...], int]:
  """Parses the workers of a collective: mesh axes, if known, and the number."""
  # XLA writes groups in four forms: pairs of a permutation, an iota, a named
  # mesh, or a list of lists. Which one depends on the partitioner.
  if pairs := _PAIRS.search(attributes):
    numbers = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
    return (), _ledger.permuted_workers((int(a), int(b)) for a, b in numbers)
  if named := _MESH.search(attributes):
    return _parse_mesh_group(*named.groups())
  if iota := _IOTA.search(attributes):
    groups = _expand_iota(*iota.groups())
  elif listed := _LISTED.search(attributes):
    rows = re.findall(r"\{([\d,]*)\}", listed[1] or "")
    groups = frozenset(frozenset(_integers(row)) for row in rows)
  else:
    raise ValueError(
      f"`compiled` must state its replica groups, got {attributes!r}."
    )
  if not groups:
    groups = frozenset([frozenset(range(devices))])
  workers = max(len(group) for group in groups)
  return () if mesh is None else _find_axes(groups, mesh), workers


def _integers(text: str) -> list[int]:
  """Returns the numbers between commas."""
  return [int(n) for n in text.split(",") if n]


def _expand_iota(shape: str, dims: str, order: str | None) -> _Groups:
  """Expands XLA's iota notation `[groups,size]<=[dims]T(order)` to groups."""
  sizes = _integers(dims)
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  if order:
    ids = ids.transpose(_integers(order))
  rows = ids.reshape(-1, _integers(shape)[-1])
  return frozenset(frozenset(row.tolist()) for row in rows)


def _find_axes(groups: _Groups, mesh: Mesh) -> tuple[str, ...]:
  """Finds the axes of a mesh whose workers are these groups; () if none are."""
  sizes = mesh.devices.shape
  ids = np.arange(mesh.size).reshape(sizes)
  axes = [i for i, n in enumerate(sizes) if n > 1]
  for count in range(1, len(axes) + 1):
    for chosen in itertools.combinations(axes, count):
      last = np.moveaxis(ids, chosen, range(-count, 0))
      rows = last.reshape(-1, math.prod(sizes[i] for i in chosen))
      if groups == frozenset(frozenset(row.tolist()) for row in rows):
        return tuple(mesh.axis_names[i] for i in chosen)
  return ()


def _parse_mesh_group(mesh: str, group: str) -> tuple[tuple[str, ...], int]:
  """Returns the axes and the size of a group that is written by a mesh."""
  sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", mesh)}
  # A part of an axis is written with its own size: 'data':(2)4.
  parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", group)
  workers = math.prod(int(part) if part else sizes[n] for n, part in parts)
  names = tuple(name for name, _ in parts)
  # Shardy invents names like axis_0 where it has lost the mesh: no axis.
  invented = any(re.fullmatch(r"axis_\d+", name) for name in names)
  return () if invented else names, workers
