"""The ledger of a compiled program: what the compiler really sends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

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

_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(\S+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_CALLED = re.compile(
  r"\b(body|branch_computations|called_computations|calls|condition|to_apply"
  r"|false_computation|true_computation)=(?:%([^\s,}]+)|\{([^}]*)\})"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_PAIRS = re.compile(r"source_target_pairs=\{(.*?\})\}")
_LISTED = re.compile(r"replica_groups=\{(\{.*?\})?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


class _Instruction(NamedTuple):
  name: str
  type: str
  opcode: str
  operands: str
  attributes: str


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
    ValueError: The program has no text, a loop has a collective, no stated
      number of trips and `while_trips` is not given, a conditional has no
      branch of that index, or the bytes of a collective cannot be told.

  Example:
    >>> import jax
    >>> program = jax.jit(lambda x: 2 * x).lower(1.0).compile()
    >>> compiled_bytes(program).total_bytes
    0.0
  """
  check_choices(branch, while_trips)
  text = compiled.as_text()
  if text is None:
    raise ValueError(f"`compiled` must have a text, got {compiled!r}.")
  return Ledger(tuple(_Program(text, branch, while_trips).moves()))


class _Program:
  """A program's text, split into computations."""

  def __init__(
    self, text: str, branch: int | None, while_trips: int | None
  ) -> None:
    self._branch = branch
    self._while_trips = while_trips
    self._entry = ""
    self._computations: dict[str, list[_Instruction]] = {}
    self._counted: dict[str, list[Move]] = {}
    self._devices = math.prod(
      int(n)
      for n in re.findall(
        r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0]
      )
    )
    self._read(text)

  def _read(self, text: str) -> None:
    current: list[_Instruction] = []
    for line in text.splitlines():
      instruction = _parse(line)
      if instruction is not None:
        current.append(instruction)
      elif opening := _COMPUTATION.match(line):
        entry, name = opening.groups()
        current = self._computations.setdefault(name, [])
        self._entry = name if entry else self._entry

  def moves(self) -> list[Move]:
    return self._computation(self._entry)

  def _computation(self, name: str) -> list[Move]:
    if name not in self._counted:
      body = self._computations[name]
      types = {instruction.name: instruction.type for instruction in body}
      self._counted[name] = [
        move for ins in body for move in self._instruction(ins, types)
      ]
    return self._counted[name]

  def _instruction(
    self, ins: _Instruction, types: dict[str, str]
  ) -> list[Move]:
    base = ins.opcode.removesuffix("-start")
    if base in _OPS:
      return self._collective(ins, _OPS[base], types)
    _check_countable(ins, base)
    called = dict(_called(ins.attributes))
    if ins.opcode == "while":
      return self._while(ins, called)
    inner = [self._computation(n) for names in called.values() for n in names]
    if ins.opcode == "conditional":
      if "true_computation" in called:  # Indexed as in JAX: false is 0.
        order = ("false_computation", "true_computation")
        inner = [self._computation(called[key][0]) for key in order]
      return pick_branch(inner, self._branch, f"conditional %{ins.name}")
    return [move for moves in inner for move in moves]

  def _while(
    self, ins: _Instruction, called: dict[str, list[str]]
  ) -> list[Move]:
    stated = _TRIPS.search(ins.attributes)
    trips = int(stated[1]) if stated else self._while_trips
    body = self._computation(called["body"][0])
    condition = self._computation(called["condition"][0])
    return repeat_loop(body, condition, trips, f"loop %{ins.name}")

  def _collective(
    self, ins: _Instruction, op: str, types: dict[str, str]
  ) -> list[Move]:
    axes, workers = _group(ins.attributes, self._devices)
    operands = [
      array
      for operand in _split(ins.operands)
      for array in _arrays(_operand_type(operand, types))
    ]
    if op == "all_to_all" and operands:
      # The tuple form has one operand for each worker to send to.
      operands = [(operands[0][0], sum(bits for _, bits in operands))]
    return [
      Move(op, axes, workers, dtype, -(-bits // 8), 1)
      for dtype, bits in operands
    ]


def _check_countable(ins: _Instruction, base: str) -> None:
  # Counting what cannot be counted as 0 bytes would be a silent lie.
  if base in _UNCOUNTABLE and "is_host_transfer=true" not in ins.attributes:
    raise ValueError(
      "`compiled` must use collectives of known size, got"
      f" {ins.opcode} in %{ins.name}."
    )


def _parse(line: str) -> _Instruction | None:
  match = _INSTRUCTION.match(line)
  if match is None:
    return None
  name, rest = match.groups()
  end = _closing(rest) if rest.startswith("(") else rest.find(" ")
  shape, rest = rest[:end], rest[end:].lstrip()
  opcode, _, _ = rest.partition("(")
  rest = rest[len(opcode) :]
  end = _closing(rest)
  operands = re.sub(r"/\*.*?\*/", "", rest[1 : end - 1])
  return _Instruction(name, shape, opcode, operands, rest[end:])


def _closing(text: str) -> int:
  """The place after the bracket that closes the one `text` begins with."""
  depth = 0
  for bracket in re.finditer(r"[()\[\]{}]", text):
    depth += 1 if bracket[0] in "([{" else -1
    if depth == 0:
      return bracket.end()
  return len(text)


def _split(operands: str) -> Iterator[str]:
  """The operands of a list, which may have types with commas in them."""
  depth = 0
  start = 0
  for mark in re.finditer(r"[()\[\]{},]", operands + ","):
    if mark[0] != ",":
      depth += 1 if mark[0] in "([{" else -1
    elif depth == 0:
      yield operands[start : mark.start()].strip()
      start = mark.end()


def _operand_type(operand: str, types: dict[str, str]) -> str:
  """The type written before the operand's name, or where it is defined."""
  written, _, name = operand.rpartition(" ")
  return written or types.get(name.removeprefix("%"), "")


def _arrays(shape: str) -> list[tuple[str, int]]:
  """The dtype and the bits of every array in a type."""
  return [
    (_dtype(code), _bits(code) * math.prod(map(int, re.findall(r"\d+", dims))))
    for code, dims in _ARRAY.findall(shape)
    if code != "token"
  ]


def _bits(code: str) -> int:
  width = re.match(r"[a-z]+(\d+)", code)
  return int(width[1]) if width else 8


def _dtype(code: str) -> str:
  """The JAX name of a compiler's element type: `u8` is `uint8`."""
  kinds = {
    "pred": "bool",
    "s": "int",
    "u": "uint",
    "f": "float",
    "bf": "bfloat",
    "c": "complex",
  }
  match = re.fullmatch(r"([a-z]+)(\d+)(.*)", code)
  if match is None:
    return kinds.get(code, code)
  kind, width, rest = match.groups()
  return kinds.get(kind, kind) + width + (rest and "_" + rest)


def _called(attributes: str) -> Iterator[tuple[str, list[str]]]:
  """The computations that an instruction's attributes name, by attribute."""
  for key, one, several in _CALLED.findall(attributes):
    names = [one] if one else several.split(",")
    yield key, [name.strip().removeprefix("%") for name in names]


def _group(attributes: str, devices: int) -> tuple[tuple[str, ...], int]:
  """The mesh axes, where they are named, and the size of a group."""
  if pairs := _PAIRS.search(attributes):
    numbers = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
    return (), permuted_workers((int(a), int(b)) for a, b in numbers)
  if iota := _IOTA.search(attributes):
    return (), int(iota[1].split(",")[-1])
  if mesh := _MESH.search(attributes):
    return _mesh_group(*mesh.groups())
  listed = _LISTED.search(attributes)
  if listed is None:
    raise ValueError(
      f"`compiled` must state its replica groups, got {attributes!r}."
    )
  groups = re.findall(r"\{([\d,]*)\}", listed[1] or "")
  return (), max((len(g.split(",")) for g in groups), default=devices)


def _mesh_group(mesh: str, group: str) -> tuple[tuple[str, ...], int]:
  sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", mesh)}
  # A part of an axis is written with its own size: 'data':(2)4.
  parts = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", group)
  workers = math.prod(int(part) if part else sizes[n] for n, part in parts)
  names = tuple(name for name, _ in parts)
  # The partitioner makes such names up where it has lost the mesh.
  invented = any(re.fullmatch(r"axis_\d+", name) for name in names)
  return () if invented else names, workers
