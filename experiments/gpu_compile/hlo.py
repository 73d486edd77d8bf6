"""Kernels of a compiled program and the bytes they move, read from HLO."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxmotion import program

# Instructions that move no bytes.
_FREE = {
  *("add-dependency", "after-all", "bitcast", "constant", "opt-barrier"),
  *("get-tuple-element", "parameter", "partition-id", "replica-id", "tuple"),
}
_SLICES = {"dynamic-slice", "gather", "slice"}
# Instructions that update their first operand in place, and the operand that
# holds the updates.
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}


class Kernel(NamedTuple):
  """One instruction that runs on the device."""

  name: str  # Name of the instruction.
  opcode: str  # Opcode of the instruction: fusion, custom-call, copy, ...
  # Bytes of the operands, each counted once, though a fusion may load a value
  # several times; of an operand that is only sliced, the bytes of the slices.
  read_bytes: int
  # Bytes of the results; of a result updated in place, the bytes of the
  # updates.
  write_bytes: int
  # Number of kernels that the instruction takes, each of which moves those
  # bytes: a sort takes several.
  launches: int
  # Number of times that it runs, in a loop; None if the compiler does not know.
  runs: int | None

  @property
  def traffic_bytes(self) -> int | None:
    """Bytes read and written by all launches of all runs; None if unknown."""
    if self.runs is None:
      return None
    return self.runs * self.launches * (self.read_bytes + self.write_bytes)


_Computation = Mapping[str, program.Instruction]


def list_kernels(text: str, launches: Mapping[str, int]) -> list[Kernel]:
  """Lists the instructions that a program runs on the device, in order."""
  # Of a conditional, the branch that moves most bytes is listed.
  module = program.parse_hlo(text)
  entry = module.computations[module.entry]
  return list(_walk_instructions(entry, 1, module.computations, launches))


def _walk_instructions(
  computation: _Computation,
  runs: int | None,
  computations: Mapping[str, _Computation],
  launches: Mapping[str, int],
) -> Iterator[Kernel]:
  """Yields the kernels of a computation and of those that it calls."""

  def list_inner(name: str, runs: int | None) -> list[Kernel]:
    inner = computations[name]
    return list(_walk_instructions(inner, runs, computations, launches))

  for each in computation.values():
    if each.opcode in _FREE or each.opcode.endswith(("-done", "-update")):
      continue
    if each.opcode == "while":
      trips = each.known_trips
      times = None if trips is None or runs is None else trips * runs
      for name in _called_computations(each, "condition", "body"):
        yield from list_inner(name, times)
    elif each.opcode == "conditional":
      branches = _called_computations(
        each, "branch_computations", "true_computation", "false_computation"
      )
      yield from max(
        (list_inner(name, runs) for name in branches), key=_traffic_of
      )
    elif each.opcode in ("call", "async-start"):
      for name in _called_computations(each, "to_apply", "calls"):
        yield from list_inner(name, runs)
    else:
      read, written = _count_bytes(each, computation, computations)
      count = launches.get(each.name, 1)
      yield Kernel(each.name, each.opcode, read, written, count, runs)


def _called_computations(each: program.Instruction, *keys: str) -> list[str]:
  """Returns the computations that an instruction calls by these attributes."""
  return [name for key in keys for name in each.called.get(key, ())]


def _traffic_of(branch: list[Kernel]) -> int:
  return sum(k.launches * (k.read_bytes + k.write_bytes) for k in branch)


def _count_bytes(
  each: program.Instruction,
  computation: _Computation,
  computations: Mapping[str, _Computation],
) -> tuple[int, int]:
  """Returns the bytes that an instruction reads and writes."""
  if each.opcode == "copy-start":
    size = sum(computation[name].memory_bytes for name in each.operand_names)
    return size, size
  if each.opcode == "fusion":
    inner = computations[_called_computations(each, "calls")[0]]
    read = sum(
      _read_bytes(name, inner)
      for name, i in inner.items()
      if i.opcode == "parameter"
    )
    return read, _written_bytes(
      next(i for i in inner.values() if i.is_root), inner
    )
  distinct = dict.fromkeys(each.operand_names)
  # An instruction alone is counted like a fusion of this one instruction.
  alone = {name: computation[name] for name in distinct} | {each.name: each}
  read = sum(_read_bytes(name, alone) for name in distinct)
  return read, _written_bytes(each, alone)


def _read_bytes(name: str, computation: _Computation) -> int:
  """Returns the bytes of a value that its users read."""
  whole, parts = computation[name].memory_bytes, 0
  for user in computation.values():
    if name not in user.operand_names:
      continue
    first_only = user.operand_names.index(name) == 0 and (
      user.operand_names.count(name) == 1
    )
    if user.opcode == "bitcast":
      parts += _read_bytes(user.name, computation)
    elif user.opcode in _SLICES and first_only:
      parts += user.memory_bytes
    elif not (user.opcode in _UPDATES and first_only):
      return whole
  return min(whole, parts)


def _written_bytes(root: program.Instruction, computation: _Computation) -> int:
  """Returns the bytes that are written to make a value."""
  if root.opcode in ("bitcast", "tuple"):
    return sum(
      _written_bytes(computation[name], computation)
      for name in root.operand_names
    )
  if root.opcode in _UPDATES:
    return computation[root.operand_names[_UPDATES[root.opcode]]].memory_bytes
  return root.memory_bytes
