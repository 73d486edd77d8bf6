"""Which operations run together, and the bytes that they then move.

An elementwise value is computed where it is read and never written, unless

* the program returns it;
* an operation reads it that is neither elementwise nor a reduction;
* several kernels read it, and it is costly (a transcendental function or a
  division) or reading it again takes fewer bytes than computing it again.

A kernel writes one value (all results of an operation that is not
elementwise) and reads every array it needs from memory once. Views (reshapes,
transposes, slices) move nothing by themselves: what reads them does. What
changes a slice of an array in place computes it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxmotion.perfmodel.cost._ops import (
  COSTLY,
  flops_of,
  is_fusible,
  is_reduction,
  kind_of,
)
from jaxmotion.perfmodel.cost._trace import CountedProgram
from jaxmotion.program import VIEWS, Step, Value, writes_in_place


class Kernel(NamedTuple):
  """What runs in one piece.

  Args:
    kind: class of the operation that makes the result, one of `KINDS`.
    dtype: element type of its first operand.
    flops: of one execution, with those of what is fused into it.
    bytes: read from and written to memory by one execution.
    count: executions; of branches and their chances a fraction.

  Example:
    >>> Kernel("matmul", "float32", 2e6, 1.2e5, 10).flops
    2000000.0
  """

  kind: str
  dtype: str
  flops: float
  bytes: float
  count: float = 1.0  # type: ignore[assignment]  # Hides tuple.count.


class KernelStep(NamedTuple):
  """A kernel of a program, or an operation that holds programs.

  Attributes:
    node: the operation that makes the result.
    kernel: what it costs, unless it holds programs.
    reads: values in memory that it needs.
  """

  node: Step
  kernel: Kernel
  reads: tuple[Value, ...]


class _Source(NamedTuple):
  """How a value that is not written is computed.

  Attributes:
    reads: values in memory that it is computed from.
    nodes: the operations, by their place in the program.
  """

  reads: dict[Value, None]
  nodes: dict[int, Step]


def fuse(program: CountedProgram) -> list[KernelStep]:
  """Groups the operations of a program into kernels, in program order.

  Args:
    program: what `trace` made.
  """
  return _steps(program, _written(program))


def _steps(program: CountedProgram, written: set[Value]) -> list[KernelStep]:
  fused: dict[Value, _Source] = {}
  steps = []
  for index, node in enumerate(program.steps):
    if node.name in VIEWS:
      continue
    source = _source(index, node, fused)
    if is_fusible(node) and node.outs[0] not in written:
      fused[node.outs[0]] = source
    else:
      reads = tuple({v.source: None for v in source.reads})
      steps.append(KernelStep(node, _kernel(node, source), reads))
  return steps


def _source(index: int, node: Step, fused: dict[Value, _Source]) -> _Source:
  reads: dict[Value, None] = {}
  nodes = {index: node}
  for value in node.arrays:
    if value is None:
      continue
    if value.source in fused:
      reads.update(fused[value.source].reads)
      nodes.update(fused[value.source].nodes)
    else:
      reads[value] = None
  return _Source(reads, nodes)


def _kernel(node: Step, source: _Source) -> Kernel:
  first = next((v for v in (*node.arrays, *node.outs) if v is not None), None)
  return Kernel(
    kind_of(node),
    "none" if first is None else first.dtype,
    float(sum(map(flops_of, source.nodes.values()))),
    float(moved_bytes(node, source.reads)),
  )


def moved_bytes(node: Step, reads: Iterable[Value]) -> int:
  """Bytes read and written, each array once."""
  if node.name == "gather":
    return 2 * node.outs[0].nbytes + _nbytes(node.arrays[1:])
  if node.name == "dynamic_update_slice":
    target, update, *places = node.arrays
    apart = {id(target), *map(id, places)}
    made_of = [v for v in reads if id(v) not in apart]
    return _read_bytes(made_of) + _nbytes([update])
  if writes_in_place(node.name):
    update = node.arrays[2]
    own = update.nbytes if update else 0
    return 3 * own + _nbytes(node.arrays[1:2])  # the target's places: twice
  return _read_bytes(reads) + _nbytes(node.outs)


def _read_bytes(reads: Iterable[Value]) -> int:
  """Bytes of arrays, of which views may overlap."""
  seen: dict[Value, int] = {}
  for view in reads:
    seen[view.source] = seen.get(view.source, 0) + view.nbytes
  return sum(min(n, source.nbytes) for source, n in seen.items())


def _nbytes(values: Iterable[Value | None]) -> int:
  return sum(v.nbytes for v in values if v is not None)


def _written(program: CountedProgram) -> set[Value]:
  """The elementwise values that are written to memory."""
  written = {v.source for v in program.outputs if v is not None}
  readers: dict[Value, list[int]] = {}
  for index, node in enumerate(program.steps):
    if node.name in VIEWS:
      continue
    apart = not (is_fusible(node) or is_reduction(node))
    for i, value in enumerate(node.arrays):
      if value is not None:
        readers.setdefault(value.source, []).append(index)
        if apart and (i == 0 or node.name != "dynamic_update_slice"):
          written.add(value.source)
  _write_shared(program.steps, readers, written)
  return written


def _write_shared(
  nodes: tuple[Step, ...], readers: dict[Value, list[int]], written: set[Value]
) -> None:
  """Adds what several kernels read and had better not compute again."""
  inputs: dict[Value, int] = {}
  fused: dict[Value, _Source] = {}
  for index, node in enumerate(nodes):
    if is_fusible(node) and node.outs[0] not in written:
      source = _source(index, node, fused)
      fused[node.outs[0]] = source
      inputs[node.outs[0]] = _read_bytes(source.reads)
  kernels: dict[Value, frozenset[int]] = {}
  for node in reversed(nodes):
    own = node.outs[0] if node.outs else None
    if own is None or own not in fused:
      continue
    into: set[int] = set()
    for reader in readers.get(own, ()):
      out = nodes[reader].outs[0]
      into |= kernels.get(out, frozenset((reader,)))
    times, read = len(into), inputs[own]
    again = times * read > read + (1 + times) * own.nbytes
    if times > 1 and (again or node.name in COSTLY):
      written.add(own)
    else:
      kernels[own] = frozenset(into)
