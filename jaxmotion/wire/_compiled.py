"""The ledger of a compiled program: collectives in the compiler's own text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jaxmotion import core, program
from jaxmotion.wire import _groups, _ledger

_OPS = {
  "all-reduce": "all_reduce",
  "all-gather": "all_gather",
  "reduce-scatter": "reduce_scatter",
  "all-to-all": "all_to_all",
  "collective-permute": "collective_permute",
}
_UNCOUNTABLE = ("ragged-all-to-all", "collective-broadcast", "send")


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
  _ledger.check_choices(branch, while_trips)
  if mesh is not None:
    core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  text = compiled.as_text()
  if text is None:
    raise ValueError(f"`compiled` must have a text, got {compiled!r}.")
  counter = _MoveCounter(program.parse_hlo(text), branch, while_trips, mesh)
  return _ledger.Ledger(tuple(counter.count_entry()))


class _MoveCounter:
  """Counts the moves of a compiled program, each computation once."""

  def __init__(
    self,
    module: program.HloModule,
    branch: int | None,
    while_trips: int | None,
    mesh: Mesh | None,
  ) -> None:
    self._module = module
    self._branch = branch
    self._mesh = mesh
    self._while_trips = while_trips
    self._counted: dict[str, list[_ledger.Move]] = {}
    counts = re.findall(
      r"\b(?:num_partitions|replica_count)=(\d+)", module.header
    )
    self._devices = math.prod(map(int, counts))

  def count_entry(self) -> list[_ledger.Move]:
    return self._count_computation(self._module.entry)

  def _count_computation(self, name: str) -> list[_ledger.Move]:
    if name not in self._counted:
      body = self._module.computations[name]
      self._counted[name] = [
        move
        for instruction in body.values()
        for move in self._count_instruction(instruction, body)
      ]
    return self._counted[name]

  def _count_instruction(
    self,
    instruction: program.Instruction,
    body: Mapping[str, program.Instruction],
  ) -> list[_ledger.Move]:
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
      return _ledger.pick_branch(inner, self._branch, said)
    return [move for moves in inner for move in moves]

  def _count_while(
    self, instruction: program.Instruction
  ) -> list[_ledger.Move]:
    called, stated = instruction.called, instruction.known_trips
    trips = self._while_trips if stated is None else stated
    body = self._count_computation(called["body"][0])
    condition = self._count_computation(called["condition"][0])
    return _ledger.repeat_loop(
      body, condition, trips, f"loop %{instruction.name}"
    )

  def _count_collective(
    self,
    instruction: program.Instruction,
    op: str,
    body: Mapping[str, program.Instruction],
  ) -> list[_ledger.Move]:
    axes, workers = _groups.parse_group(
      instruction.attributes, self._devices, self._mesh
    )
    operands = [
      (array.dtype, array.element_bits * array.size)
      for operand in program.split_operands(instruction.operands)
      for array in program.parse_arrays(_operand_type(operand, body))
    ]
    if op == "all_to_all" and operands:
      # The tuple form has one operand for each worker to send to.
      operands = [(operands[0][0], sum(bits for _, bits in operands))]
    return [
      _ledger.Move(op, axes, workers, dtype, -(-bits // 8), 1)
      for dtype, bits in operands
    ]


def _check_countable(instruction: program.Instruction, base: str) -> None:
  # Counting what cannot be counted as 0 bytes would be a silent lie.
  on_host = "is_host_transfer=true" in instruction.attributes
  if base in _UNCOUNTABLE and not on_host:
    raise ValueError(
      "`compiled` must use collectives of known size, got"
      f" {instruction.opcode} in %{instruction.name}."
    )


def _operand_type(operand: str, body: Mapping[str, program.Instruction]) -> str:
  """Returns the type before the operand's name, or where it is defined."""
  written, _, name = operand.rpartition(" ")
  if written:
    return written
  defined = body.get(name.removeprefix("%"))
  return "" if defined is None else defined.type
