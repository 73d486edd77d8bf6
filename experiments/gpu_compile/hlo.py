"""What a compiled program runs on the device and moves, read from its text."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxmotion.program import Instruction, parse_hlo

# Instructions that move nothing.
_FREE = {
  "add-dependency",
  "after-all",
  "bitcast",
  "constant",
  "get-tuple-element",
  "opt-barrier",
  "parameter",
  "partition-id",
  "replica-id",
  "tuple",
}
_SLICES = {"dynamic-slice", "gather", "slice"}
# Instructions that change part of their first operand, where it is.
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}


class Kernel(NamedTuple):
  """One instruction that runs on the device.

  Attributes:
    name: of the instruction.
    opcode: fusion, custom-call, copy, ...
    read_bytes: of its operands, each once, though a fusion may load a value
      several times; of what it only slices, the slices.
    write_bytes: of its results; of what it updates in place, the updates.
    launches: kernels it takes, each of which moves those bytes: a sort takes
      several.
    runs: how often it runs, as part of a loop; None if the compiler does not
      know.
  """

  name: str
  opcode: str
  read_bytes: int
  write_bytes: int
  launches: int
  runs: int | None

  @property
  def traffic_bytes(self) -> int | None:
    """Bytes read and written by all launches of all runs."""
    if self.runs is None:
      return None
    return self.runs * self.launches * (self.read_bytes + self.write_bytes)


_Computation = Mapping[str, Instruction]


def kernels(text: str, launches: Mapping[str, int]) -> list[Kernel]:
  """Lists what a program runs on the device, in its order.

  Of a conditional, the branch that moves most is listed.

  Args:
    text: of a scheduled module.
    launches: kernels that an instruction takes, by its name, if not one.
  """
  module = parse_hlo(text)
  entry = module.computations[module.entry]
  return list(_walk(entry, 1, module.computations, launches))


def _walk(
  computation: _Computation,
  runs: int | None,
  computations: Mapping[str, _Computation],
  launches: Mapping[str, int],
) -> Iterator[Kernel]:
  def inside(name: str, runs: int | None) -> list[Kernel]:
    return list(_walk(computations[name], runs, computations, launches))

  for each in computation.values():
    if each.opcode in _FREE or each.opcode.endswith(("-done", "-update")):
      continue
    if each.opcode == "while":
      trips = each.known_trips
      times = None if trips is None or runs is None else trips * runs
      for name in _called(each, "condition", "body"):
        yield from inside(name, times)
    elif each.opcode == "conditional":
      branches = _called(
        each, "branch_computations", "true_computation", "false_computation"
      )
      yield from max((inside(name, runs) for name in branches), key=_moved)
    elif each.opcode in ("call", "async-start"):
      for name in _called(each, "to_apply", "calls"):
        yield from inside(name, runs)
    else:
      read, written = _moves(each, computation, computations)
      count = launches.get(each.name, 1)
      yield Kernel(each.name, each.opcode, read, written, count, runs)


def _called(each: Instruction, *keys: str) -> list[str]:
  """Returns the computations that an instruction calls by these attributes."""
  return [name for key in keys for name in each.called.get(key, ())]


def _moved(branch: list[Kernel]) -> int:
  return sum(k.launches * (k.read_bytes + k.write_bytes) for k in branch)


def _moves(
  each: Instruction,
  computation: _Computation,
  computations: Mapping[str, _Computation],
) -> tuple[int, int]:
  """Bytes that an instruction reads and writes."""
  if each.opcode == "copy-start":
    size = sum(computation[name].memory_bytes for name in each.operand_names)
    return size, size
  if each.opcode == "fusion":
    inner = computations[_called(each, "calls")[0]]
    read = sum(
      _touched(name, inner)
      for name, i in inner.items()
      if i.opcode == "parameter"
    )
    return read, _written(next(i for i in inner.values() if i.is_root), inner)
  distinct = dict.fromkeys(each.operand_names)
  # As if it were a fusion of this one instruction.
  alone = {name: computation[name] for name in distinct} | {each.name: each}
  read = sum(_touched(name, alone) for name in distinct)
  return read, _written(each, alone)


def _touched(name: str, computation: _Computation) -> int:
  """Bytes of a value that its users read."""
  whole, parts = computation[name].memory_bytes, 0
  for user in computation.values():
    if name not in user.operand_names:
      continue
    first_only = user.operand_names.index(name) == 0 and (
      user.operand_names.count(name) == 1
    )
    if user.opcode == "bitcast":
      parts += _touched(user.name, computation)
    elif user.opcode in _SLICES and first_only:
      parts += user.memory_bytes
    elif not (user.opcode in _UPDATES and first_only):
      return whole
  return min(whole, parts)


def _written(root: Instruction, computation: _Computation) -> int:
  """Bytes of a value that are written to make it."""
  if root.opcode in ("bitcast", "tuple"):
    return sum(
      _written(computation[name], computation) for name in root.operand_names
    )
  if root.opcode in _UPDATES:
    return computation[root.operand_names[_UPDATES[root.opcode]]].memory_bytes
  return root.memory_bytes
