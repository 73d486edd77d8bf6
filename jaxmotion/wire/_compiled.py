"""The ledger of a compiled program: collectives in the compiler's own text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import jax

from jaxmotion.program import (
  HloModule,
  Instruction,
  parse_arrays,
  parse_hlo,
  split_operands,
)
from jaxmotion.wire._ledger import (
  Ledger,
  Move,
  check_choices,
  permuted_workers,
  pick_branch,
  repeat_loop,
)

_OPS = {
  "all-reduce": "all_reduce",
  "all-gather": "all_gather",
  "reduce-scatter": "reduce_scatter",
  "all-to-all": "all_to_all",
  "collective-permute": "collective_permute",
}
_UNCOUNTABLE = ("ragged-all-to-all", "collective-broadcast", "send")

_PAIRS = re.compile(r"source_target_pairs=\{(.*?\})\}")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


def compiled_bytes(
  compiled: jax.stages.Compiled,
  *,
  branch: int | None = None,
  while_trips: int | None = None,
) -> Ledger:
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

  Returns:
    The ledger, in bytes one worker sends. Its axes are `()` where the text
    gives devices instead of mesh axes.

  Raises:
    TypeError: `compiled` is something else, such as a lowered program.
    ValueError: The program has no text, a loop has a collective, no stated
      number of trips and `while_trips` is not given, a conditional has no
      branch of that index, or the bytes of a collective cannot be told.

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
  check_choices(branch, while_trips)
  text = compiled.as_text()
  if text is None:
    raise ValueError(f"`compiled` must have a text, got {compiled!r}.")
  counter = _MoveCounter(parse_hlo(text), branch, while_trips)
  return Ledger(tuple(counter.count_entry()))


class _MoveCounter:
  """Counts the moves of a compiled program, each computation once."""

  def __init__(
    self, module: HloModule, branch: int | None, while_trips: int | None
  ) -> None:
    self._module = module
    self._branch = branch
    self._while_trips = while_trips
    self._counted: dict[str, list[Move]] = {}
    counts = re.findall(
      r"\b(?:num_partitions|replica_count)=(\d+)", module.header
    )
    self._devices = math.prod(map(int, counts))

  def count_entry(self) -> list[Move]:
    return self._count_computation(self._module.entry)

  def _count_computation(self, name: str) -> list[Move]:
    if name not in self._counted:
      body = self._module.computations[name]
      self._counted[name] = [
        move
        for instruction in body.values()
        for move in self._count_instruction(instruction, body)
      ]
    return self._counted[name]

  def _count_instruction(
    self, instruction: Instruction, body: Mapping[str, Instruction]
  ) -> list[Move]:
    base = instruction.opcode.removesuffix("-start")
    if base in _OPS:
      return self._count_collective(instruction, _OPS[base], body)
    _check_countable(instruction, base)
    called = instruction.called
    if instruction.opcode == "while":
      return self._count_while(instruction)
    inner = [
      self._count_computation(n) for names in called.values() for n in names
    ]
    if instruction.opcode == "conditional":
      if "true_computation" in called:  # Indexed as in JAX: false is 0.
        order = ("false_computation", "true_computation")
        inner = [self._count_computation(called[key][0]) for key in order]
      said = f"conditional %{instruction.name}"
      return pick_branch(inner, self._branch, said)
    return [move for moves in inner for move in moves]

  def _count_while(self, instruction: Instruction) -> list[Move]:
    called, stated = instruction.called, instruction.known_trips
    trips = self._while_trips if stated is None else stated
    body = self._count_computation(called["body"][0])
    condition = self._count_computation(called["condition"][0])
    return repeat_loop(body, condition, trips, f"loop %{instruction.name}")

  def _count_collective(
    self,
    instruction: Instruction,
    op: str,
    body: Mapping[str, Instruction],
  ) -> list[Move]:
    axes, workers = _parse_group(instruction.attributes, self._devices)
    operands = [
      (array.dtype, array.element_bits * array.size)
      for operand in split_operands(instruction.operands)
      for array in parse_arrays(_operand_type(operand, body))
    ]
    if op == "all_to_all" and operands:
      # The tuple form has one operand for each worker to send to.
      operands = [(operands[0][0], sum(bits for _, bits in operands))]
    return [
      Move(op, axes, workers, dtype, -(-bits // 8), 1)
      for dtype, bits in operands
    ]


def _check_countable(instruction: Instruction, base: str) -> None:
  # Counting what cannot be counted as 0 bytes would be a silent lie.
  on_host = "is_host_transfer=true" in instruction.attributes
  if base in _UNCOUNTABLE and not on_host:
    raise ValueError(
      "`compiled` must use collectives of known size, got"
      f" {instruction.opcode} in %{instruction.name}."
    )


def _operand_type(operand: str, body: Mapping[str, Instruction]) -> str:
  """Returns the type before the operand's name, or where it is defined."""
  written, _, name = operand.rpartition(" ")
  if written:
    return written
  defined = body.get(name.removeprefix("%"))
  return "" if defined is None else defined.type


def _parse_group(attributes: str, devices: int) -> tuple[tuple[str, ...], int]:
  """Returns the mesh axes, where the text names them, and the group size.

  XLA writes groups in four forms: pairs of a permutation, an iota, a named
  mesh, or a list of lists; which one depends on the partitioner.
  """
  if pairs := _PAIRS.search(attributes):
    numbers = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
    return (), permuted_workers((int(a), int(b)) for a, b in numbers)
  if iota := _IOTA.search(attributes):
    return (), int(iota[1].split(",")[-1])
  if mesh := _MESH.search(attributes):
    return _parse_mesh_group(*mesh.groups())
  listed = _LISTED.search(attributes)
  if listed is None:
    raise ValueError(
      f"`compiled` must state its replica groups, got {attributes!r}."
    )
  groups = re.findall(r"\{([\d,]*)\}", listed[1] or "")
  return (), max((len(g.split(",")) for g in groups), default=devices)


def _parse_mesh_group(mesh: str, group: str) -> tuple[tuple[str, ...], int]:
  sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", mesh)}
  # A part of an axis is written with its own size: 'data':(2)4.
  parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", group)
  workers = math.prod(int(part) if part else sizes[n] for n, part in parts)
  names = tuple(name for name, _ in parts)
  # Shardy invents names like axis_0 where it has lost the mesh: no axis.
  invented = any(re.fullmatch(r"axis_\d+", name) for name in names)
  return () if invented else names, workers
