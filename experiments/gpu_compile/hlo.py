"""What a compiled program runs on the device and moves, read from its text."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


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


class _Instruction(NamedTuple):
  name: str
  sizes: tuple[int, ...]  # Bytes of each array of the result.
  opcode: str
  arguments: str
  attributes: str
  root: bool

  @property
  def size(self) -> int:
    return sum(self.sizes)

  @property
  def operands(self) -> list[str]:
    return re.findall(r"%([\w.-]+)", self.arguments)

  def called(self, *keys: str) -> list[str]:
    """Names of the computations that it calls by these attributes."""
    found = re.findall(
      rf"\b(?:{'|'.join(keys)})=(\{{[^}}]*\}}|%[\w.-]+)", self.attributes
    )
    return re.findall(r"%([\w.-]+)", " ".join(found))


_Computation = dict[str, _Instruction]


def kernels(text: str, launches: Mapping[str, int]) -> list[Kernel]:
  """Lists what a program runs on the device, in its order.

  Of a conditional, the branch that moves most is listed.

  Args:
    text: of a scheduled module.
    launches: kernels that an instruction takes, by its name, if not one.
  """
  entry, computations = _parse(text)
  return list(_walk(computations[entry], 1, computations, launches))


def _walk(
  computation: _Computation,
  runs: int | None,
  computations: dict[str, _Computation],
  launches: Mapping[str, int],
) -> Iterator[Kernel]:
  def inside(name: str, runs: int | None) -> list[Kernel]:
    return list(_walk(computations[name], runs, computations, launches))

  for each in computation.values():
    if each.opcode in _FREE or each.opcode.endswith(("-done", "-update")):
      continue
    if each.opcode == "while":
      trips = _TRIPS.search(each.attributes)
      known = None if trips is None or runs is None else int(trips.group(1))
      times = None if known is None or runs is None else known * runs
      for name in each.called("condition", "body"):
        yield from inside(name, times)
    elif each.opcode == "conditional":
      branches = each.called(
        "branch_computations", "true_computation", "false_computation"
      )
      yield from max((inside(name, runs) for name in branches), key=_moved)
    elif each.opcode in ("call", "async-start"):
      for name in each.called("to_apply", "calls"):
        yield from inside(name, runs)
    else:
      read, written = _moves(each, computation, computations)
      count = launches.get(each.name, 1)
      yield Kernel(each.name, each.opcode, read, written, count, runs)


def _moved(branch: list[Kernel]) -> int:
  return sum(k.launches * (k.read_bytes + k.write_bytes) for k in branch)


def _moves(
  each: _Instruction,
  computation: _Computation,
  computations: dict[str, _Computation],
) -> tuple[int, int]:
  """Bytes that an instruction reads and writes."""
  if each.opcode == "copy-start":
    size = sum(computation[name].size for name in each.operands)
    return size, size
  if each.opcode == "fusion":
    inner = computations[each.called("calls")[0]]
    read = sum(
      _touched(name, inner)
      for name, i in inner.items()
      if i.opcode == "parameter"
    )
    return read, _written(next(i for i in inner.values() if i.root), inner)
  distinct = dict.fromkeys(each.operands)
  # As if it were a fusion of this one instruction.
  alone = {name: computation[name] for name in distinct} | {each.name: each}
  read = sum(_touched(name, alone) for name in distinct)
  return read, _written(each, alone)


def _touched(name: str, computation: _Computation) -> int:
  """Bytes of a value that its users read."""
  whole, parts = computation[name].size, 0
  for user in computation.values():
    if name not in user.operands:
      continue
    first_only = user.operands.index(name) == 0 and (
      user.operands.count(name) == 1
    )
    if user.opcode == "bitcast":
      parts += _touched(user.name, computation)
    elif user.opcode in _SLICES and first_only:
      parts += user.size
    elif not (user.opcode in _UPDATES and first_only):
      return whole
  return min(whole, parts)


def _written(root: _Instruction, computation: _Computation) -> int:
  """Bytes of a value that are written to make it."""
  if root.opcode in ("bitcast", "tuple"):
    return sum(
      _written(computation[name], computation) for name in root.operands
    )
  if root.opcode in _UPDATES:
    return computation[root.operands[_UPDATES[root.opcode]]].size
  return root.size


def _parse(text: str) -> tuple[str, dict[str, _Computation]]:
  """Splits a module: the name of its entry, and its computations."""
  entry = ""
  computations: dict[str, _Computation] = {}
  current: _Computation = {}
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = computations[header.group(2)] = {}
      entry = header.group(2) if header.group(1) else entry
    elif instruction := _INSTRUCTION.match(line):
      root, name, rest = instruction.groups()
      current[name] = _parse_instruction(name, bool(root), rest)
  return entry, computations


def _parse_instruction(name: str, root: bool, text: str) -> _Instruction:
  end = _closing(text, 0) + 1 if text[0] == "(" else text.index(" ")
  opcode, _, rest = text[end:].strip().partition("(")
  close = _closing("(" + rest, 0) - 1
  return _Instruction(
    name,
    tuple(_bytes(*found) for found in _ARRAY.findall(text[:end])),
    opcode,
    rest[:close],
    rest[close + 1 :],
    root,
  )


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[i], 0)
    if not depth:
      return i
  raise ValueError(f"A parenthesis is not closed in {text[:80]!r}.")


def _bytes(dtype: str, shape: str, layout: str) -> int:
  """Bytes of an array: ("bf16", "8,128", "1,0") -> 2048."""
  if dtype in ("token", "opaque"):
    return 0
  digits = re.search(r"\d+", dtype)
  bits = max(8, int(digits.group())) if digits else 8
  # Values below a byte share bytes only where the layout says so.
  packed = re.search(r"E\((\d+)\)", layout)
  bits = int(packed.group(1)) if packed else bits
  dimensions = [int(d) for d in re.findall(r"\d+", shape)]
  return -(-math.prod(dimensions) * bits // 8)
