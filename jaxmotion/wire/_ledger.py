"""Records of collectives, and the bytes that one worker sends by each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from jaxmotion import core, program

# In the order of errors, which name them all.
OPS = tuple(dict.fromkeys(program.COLLECTIVES.values()))
COUNT = core.integer(0)


class _MoveFields(NamedTuple):
  """Fields of a `Move`, which a NamedTuple itself could not check."""

  op: str
  axes: tuple[str, ...]
  workers: int
  dtype: str
  payload_bytes: int
  count: int  # type: ignore[assignment]  # Hides tuple.count on purpose.


def _check_axes(name: str, value: Any) -> Any:
  """Returns a tuple of strings, or raises."""
  noun = "a tuple of names of mesh axes"
  axes = core.instance(tuple, noun)(name, value)
  return core.sequence(noun, core.text)(name, axes)


class Move(_MoveFields):
  """One kind of collective in a program, and how often it runs.

  With `N` workers in a group and `P` payload bytes on each, one worker sends

      all_reduce          2 (N - 1) / N P
      all_gather          (N - 1) P
      reduce_scatter      (N - 1) / N P
      all_to_all          (N - 1) / N P
      collective_permute  P

  bytes an execution with the ring or pairwise algorithm. A group of one
  worker sends nothing.

  Args:
    op: One of the five names above.
    axes: Mesh axis names; `()` when a compiled program does not say.
    workers: Group size `N`.
    dtype: Name of the element type, e.g. `"uint32"`.
    payload_bytes: Bytes of the operand on one worker, for one execution.
    count: Executions per step.

  Raises:
    TypeError: A field is of another class.
    ValueError: `op` is not the name of a collective, or a number is negative.

  Example:
    >>> Move("all_gather", ("data",), 4, "uint32", 100, 3).wire_bytes
    900.0
  """

  __slots__ = ()

  @core.declare(
    op=core.choice(OPS),
    axes=_check_axes,
    workers=COUNT,
    dtype=core.text,
    payload_bytes=COUNT,
    count=COUNT,
  )
  def __new__(
    cls,
    op: str,
    axes: tuple[str, ...],
    workers: int,
    dtype: str,
    payload_bytes: int,
    count: int,
  ) -> Self:
    """Returns a move whose fields are checked."""
    return super().__new__(cls, op, axes, workers, dtype, payload_bytes, count)

  @classmethod
  def _make(  # type: ignore[override]  # mypy names the first argument _cls.
    cls, iterable: Iterable[Any]
  ) -> Self:
    """Makes a move of its fields; `_replace` calls it, and so checks them."""
    return cls(*iterable)

  @property
  def wire_bytes(self) -> float:
    """Bytes one worker sends per step."""
    return _wire_factor(self.op, self.workers) * self.payload_bytes * self.count


@dataclasses.dataclass(frozen=True)
@core.declare(
  moves=core.sequence("Move objects", core.instance(Move, "a Move"))
)
class Ledger:
  """The collectives of a program; equal moves are merged, counts added.

  Args:
    moves: The moves, in program order.

  Raises:
    TypeError: `moves` has something else than moves.

  Example:
    >>> a = Move("all_reduce", ("data",), 4, "uint32", 1024, 1)
    >>> b = Move("all_gather", ("host",), 2, "uint8", 64, 1)
    >>> ledger = Ledger((a, a, b))
    >>> print(ledger)
    op          axes  workers  dtype   payload_bytes  count  wire_bytes
    all_reduce  data        4  uint32           1024      2        3072
    all_gather  host        2  uint8              64      1          64
    total                                                          3136
    >>> ledger.per_axis()
    {('data',): 3072.0, ('host',): 64.0}
  """

  moves: tuple[Move, ...] = ()

  def __post_init__(self) -> None:
    object.__setattr__(self, "moves", _merge_moves(self.moves))

  @property
  def total_bytes(self) -> float:
    """Bytes one worker sends per step, over all moves."""
    return wire_bytes(self.moves)

  def per_axis(self) -> dict[tuple[str, ...], float]:
    """Bytes one worker sends per step over each tuple of mesh axes.

    Returns:
      A dict from axis names to bytes. A move over two axes at once has an entry
      of its own. Which of its bytes cross which axis depends on the order of
      the devices.
    """
    totals: dict[tuple[str, ...], float] = {}
    for move in self.moves:
      totals[move.axes] = totals.get(move.axes, 0.0) + move.wire_bytes
    return totals

  @core.declare(
    op=core.optional(core.choice(OPS)),
    dtype=core.optional(core.text),
    axes=core.optional(_check_axes),
  )
  def select(
    self,
    *,
    op: str | None = None,
    dtype: str | None = None,
    axes: tuple[str, ...] | None = None,
  ) -> Ledger:
    """Returns the moves that match all the given fields.

    Args:
      op: Keep this collective only.
      dtype: Keep this element type only.
      axes: Keep moves over exactly these axes.

    Returns:
      A ledger of the matching moves.

    Raises:
      TypeError: `dtype` is not a string, or `axes` no tuple of strings.
      ValueError: `op` is not the name of a collective.

    Example:
      >>> word = Move("all_gather", ("data",), 4, "uint32", 64, 1)
      >>> scale = Move("all_gather", ("data",), 4, "float32", 4, 1)
      >>> Ledger((word, scale)).select(dtype="float32").total_bytes
      12.0
    """
    wanted = {"op": op, "dtype": dtype, "axes": axes}
    moves = self.moves
    for field, value in wanted.items():
      if value is not None:
        moves = tuple(m for m in moves if getattr(m, field) == value)
    return Ledger(moves)

  def __str__(self) -> str:
    """Returns a table with one line for each move, and the total."""
    header = (*Move._fields, "wire_bytes")
    rows = [header, *(_format_cells(move) for move in self.moves)]
    blanks = ("",) * (len(header) - 2)
    rows.append(("total", *blanks, _format_number(self.total_bytes)))
    texts = map(Move._fields.index, ("op", "axes", "dtype"))
    return core.text_table(rows, right=set(range(len(header))) - set(texts))


def _wire_factor(op: str, workers: int) -> float:
  """Returns the bytes that one worker sends per byte of payload."""
  others = max(workers - 1, 0)
  fraction = others / max(workers, 1)
  if op == "all_gather":
    return float(others)
  if op == "collective_permute":
    return float(others > 0)
  return 2 * fraction if op == "all_reduce" else fraction


def _merge_moves(moves: Iterable[Move]) -> tuple[Move, ...]:
  """Returns moves of which no two are equal but for their counts."""
  counts: dict[Move, int] = {}
  for move in moves:
    kind = move._replace(count=0)
    counts[kind] = counts.get(kind, 0) + move.count
  return tuple(kind._replace(count=n) for kind, n in counts.items())


def wire_bytes(moves: Iterable[Move]) -> float:
  """Returns the bytes that one worker sends per step by all moves."""
  return math.fsum(move.wire_bytes for move in moves)


def repeat_moves(moves: Iterable[Move], times: int) -> list[Move]:
  """Returns the moves with their counts multiplied by `times`."""
  return [move._replace(count=move.count * times) for move in moves]


def repeat_loop(
  body: list[Move], condition: list[Move], trips: int | None, loop: str
) -> list[Move]:
  """Returns the moves of all trips of a while loop."""
  if not wire_bytes([*body, *condition]):
    return []
  if trips is None:
    sends = ", ".join(sorted({move.op for move in [*body, *condition]}))
    raise ValueError(
      "`while_trips` must be the number of trips of every while loop that"
      f" sends bytes and does not state it; {loop} contains {sends},"
      " got None."
    )
  return [*repeat_moves(body, trips), *repeat_moves(condition, trips + 1)]


def pick_branch(
  branches: list[list[Move]], branch: int | None, name: str
) -> list[Move]:
  """Returns the moves of the branch that a conditional is taken to follow."""
  if branch is None or not any(map(wire_bytes, branches)):
    return max(branches, key=wire_bytes)
  if branch >= len(branches):
    raise ValueError(
      f"`branch` must be less than {len(branches)}, the number of branches"
      f" of {name}, got {branch}."
    )
  return branches[branch]


def permuted_workers(pairs: Iterable[tuple[int, int]]) -> int:
  """Returns the size of the largest set that a permutation connects."""
  group: dict[int, set[int]] = {}
  for source, target in pairs:
    joined = group.get(source, {source}) | group.get(target, {target})
    group.update(dict.fromkeys(joined, joined))
  return max(map(len, group.values()), default=0)


def _format_cells(move: Move) -> tuple[str, ...]:
  cells = move._asdict() | {"axes": ",".join(move.axes) or "-"}
  return (*map(str, cells.values()), _format_number(move.wire_bytes))


def _format_number(value: float) -> str:
  return f"{value:.10g}"
