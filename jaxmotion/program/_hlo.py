"""Reads the text of compiled programs (HLO), and the bytes that they hold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(
  r"\b(body|branch_computations|called_computations|calls|condition|to_apply"
  r"|false_computation|true_computation)=(?:%([^\s,}]+)|\{([^}]*)\})"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_KINDS = {
  "pred": "bool",
  "s": "int",
  "u": "uint",
  "f": "float",
  "bf": "bfloat",
  "c": "complex",
}


class HloArray(NamedTuple):
  """Describes one array of an instruction's type."""

  code: str  # Element type as the text spells it, such as "bf16".
  size: int  # Number of elements.
  layout: str  # Text between the braces behind the shape.

  @property
  def dtype(self) -> str:
    """JAX's name of the element type: "u8" is "uint8"."""
    ((kind, width, suffix),) = re.findall("^([a-z]+)([0-9]*)(.*)", self.code)
    return _KINDS.get(kind, kind) + width + (suffix and "_" + suffix)

  @property
  def element_bits(self) -> int:
    """Bits of one element as it travels; a truth value takes 8."""
    if self.code in ("token", "opaque"):
      return 0
    width = re.match(r"[a-z]+(\d+)", self.code)
    return int(width[1]) if width else 8

  @property
  def memory_bytes(self) -> int:
    """Bytes in memory: elements share bytes only where the layout says so."""
    bits = self.element_bits and max(8, self.element_bits)
    packed = re.search(r"E\((\d+)\)", self.layout)
    bits = int(packed[1]) if packed else bits
    return -(-self.size * bits // 8)


class Instruction(NamedTuple):
  """Describes one line of a computation."""

  name: str  # Of the result.
  type: str  # Of the result, as text.
  opcode: str  # Such as "all-reduce-start".
  operands: str  # Text between the parentheses behind the opcode.
  attributes: str  # Text behind the operands.
  is_root: bool  # Whether it makes the result of its computation.

  @property
  def arrays(self) -> list[HloArray]:
    """Arrays of the result."""
    return parse_arrays(self.type)

  @property
  def memory_bytes(self) -> int:
    """Bytes of the result in memory."""
    return sum(array.memory_bytes for array in self.arrays)

  @property
  def operand_names(self) -> list[str]:
    """Names of the operands."""
    if self.opcode in ("constant", "parameter"):
      return []
    parts = [part.rpartition(" ")[2] for part in _split_operands(self.operands)]
    return [part.removeprefix("%") for part in parts if part]

  @property
  def called(self) -> dict[str, list[str]]:
    """Computations that the attributes name, by attribute."""
    found = {}
    for key, one, several in _CALLED.findall(self.attributes):
      names = [one] if one else several.split(",")
      found[key] = [name.strip().removeprefix("%") for name in names]
    return found

  @property
  def known_trips(self) -> int | None:
    """Trips of a loop, if the compiler states them."""
    stated = _TRIPS.search(self.attributes)
    return int(stated[1]) if stated else None


class HloModule(NamedTuple):
  """Holds a compiled program, split into computations."""

  header: str  # First line of the text.
  entry: str  # Name of the computation that runs first.
  # Instructions by name, in order, by computation.
  computations: dict[str, dict[str, Instruction]]


def parse_hlo(text: str) -> HloModule:
  """Splits the text of a compiled program into its instructions."""
  # text: `compiled.as_text()`.
  entry = ""
  computations: dict[str, dict[str, Instruction]] = {}
  current: dict[str, Instruction] = {}
  for line in text.splitlines():
    if match := _INSTRUCTION.match(line):
      root, name, definition = match.groups()
      current[name] = _parse_instruction(name, definition, bool(root))
    elif opening := _COMPUTATION.match(line):
      is_entry, name = opening.groups()
      current = computations.setdefault(name, {})
      entry = name if is_entry else entry
  return HloModule(text.partition("\n")[0], entry, computations)


def parse_arrays(type_text: str) -> list[HloArray]:
  """Returns the arrays of a type, tokens left out."""
  return [
    HloArray(code, math.prod(map(int, re.findall(r"\d+", dims))), layout)
    for code, dims, layout in _ARRAY.findall(type_text)
    if code != "token"
  ]


def _split_operands(operands: str) -> Iterator[str]:
  """Splits a list of operands, whose types may have commas in them.

  >>> list(_split_operands("f32[2,3] %x, (s32[], u8[2]) %y"))
  ['f32[2,3] %x', '(s32[], u8[2]) %y']
  """
  depth = 0
  start = 0
  for mark in re.finditer(r"[()\[\]{},]", operands + ","):
    if mark[0] != ",":
      depth += 1 if mark[0] in "([{" else -1
    elif depth == 0:
      yield operands[start : mark.start()].strip()
      start = mark.end()


def _parse_instruction(
  name: str, definition: str, is_root: bool
) -> Instruction:
  """Splits what is behind "%name = " in a line of a computation."""
  if definition.startswith("("):
    end = _closing_end(definition)
  else:
    end = definition.find(" ")
  type_text, remaining = definition[:end], definition[end:].lstrip()
  opcode, _, _ = remaining.partition("(")
  remaining = remaining[len(opcode) :]
  end = _closing_end(remaining)
  operands = re.sub(r"/\*.*?\*/", "", remaining[1 : end - 1])
  return Instruction(
    name, type_text, opcode, operands, remaining[end:], is_root
  )


def _closing_end(text: str) -> int:
  """Returns the position behind the bracket that closes the first one."""
  depth = 0
  for bracket in re.finditer(r"[()\[\]{}]", text):
    depth += 1 if bracket[0] in "([{" else -1
    if depth == 0:
      return bracket.end()
  return len(text)


def device_bytes(memory: Any) -> int:
  """Returns the bytes on the device while a compiled program runs."""
  # memory: `compiled.memory_analysis()`. A result that takes the place of a
  # donated argument is counted as both.
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes
  return int(held + memory.temp_size_in_bytes - memory.alias_size_in_bytes)
