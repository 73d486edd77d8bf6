"""Groups operations into kernels as XLA's fusion does, and counts their bytes.

An elementwise result is computed inside the kernels that read it and never
written, unless

* the program returns it;
* an operation reads it that is neither elementwise nor a reduction;
* several kernels read it, and it is costly (a transcendental function or a
  division), or takes fewer bytes to read again than to compute again.

A kernel writes one result (all results of an operation that is not elementwise)
and reads every array it needs from memory once. Views (reshapes, transposes,
slices) move nothing by themselves: the kernels that read them do. A kernel that
changes a slice of an array updates the array in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from jaxmotion import core
from jaxmotion.perfmodel import _ops
from jaxmotion.program import VIEWS, Step, Value, writes_in_place

_DRAW = "random_bits"
# A seed has no more bytes: a key of random numbers, an index of a layer.
_SEED_BYTES = 1024


class Kernel(NamedTuple):
  """One fused kernel: class, FLOPs, bytes moved and number of launches.

  Args:
    kind: class of the operation that makes the result, such as "matmul" or
      "elementwise".
    dtype: element type of its first operand.
    flops: FLOPs of one execution, those of fused operations included.
    bytes: bytes read from and written to memory by one execution.
    count: number of executions.

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
  """One kernel of a program, or an operation that holds programs."""

  # The operation that makes the result.
  node: Step
  # Not used if the operation holds programs.
  kernel: Kernel
  # Values in memory that the kernel reads.
  reads: tuple[Value, ...]
  # A kernel that reads seeds alone could run first.
  is_source: bool = False


class _Source(NamedTuple):
  """Operations and operands of a result that is fused into its readers."""

  # Values in memory that the result is computed from.
  reads: dict[Value, None]
  # Operations by their position in the program.
  nodes: dict[int, Step]


def fuse_kernels(
  program: _ops.CountedProgram, for_memory: bool = False
) -> list[KernelStep]:
  """Groups the operations of a program into kernels, in program order."""
  written = _find_written(program, for_memory)
  fused: dict[Value, _Source] = {}
  uniform, seeds = find_uniform(program), _find_seeds(program)
  steps = []
  for index, node in enumerate(program.steps):
    if node.name in VIEWS:
      continue
    source = _collect_source(index, node, fused, uniform, program.uniform)
    if _is_fused(node, for_memory) and node.outs[0] not in written:
      fused[node.outs[0]] = source
    else:
      reads = tuple({v.source: None for v in source.reads})
      is_source = _is_fused(node, for_memory) and seeds.issuperset(source.reads)
      kernel = _make_kernel(node, source)
      steps.append(KernelStep(node, kernel, reads, is_source))
  return steps


def _find_seeds(program: _ops.CountedProgram) -> set[Value]:
  """Returns the few bytes that are known before anything large is."""
  # They follow from arguments as small as they are, behind no barrier.
  known = {v for v in program.inputs if v.nbytes <= _SEED_BYTES}
  for step in program.steps:
    if step.name != "optimization_barrier" and known.issuperset(step.reads):
      known.update(v for v in step.outs if v.nbytes <= _SEED_BYTES)
  return known


def _collect_source(
  index: int,
  node: Step,
  fused: dict[Value, _Source],
  uniform: Collection[Value],
  given: Collection[Value],
) -> _Source:
  """Returns the operations and arrays that an operation is fused with."""
  reads: dict[Value, None] = {}
  nodes = {index: node}
  remade = list_constant_operands(node, uniform)
  for i, value in enumerate(node.arrays):
    if value is None or value.source in given or i in remade:
      continue
    if value.source in fused:
      reads.update(fused[value.source].reads)
      nodes.update(fused[value.source].nodes)
    else:
      reads[value] = None
  return _Source(reads, nodes)


def count_operation(node: Step) -> Kernel:
  """Returns one operation as a kernel of its own."""
  reads = {v: None for v in node.arrays if v is not None}
  return _make_kernel(node, _Source(reads, {0: node}))


def _make_kernel(node: Step, source: _Source) -> Kernel:
  """Returns the kernel of an operation and of all that is fused into it."""
  first = next((v for v in (*node.arrays, *node.outs) if v is not None), None)
  return Kernel(
    _ops.kind_of(node),
    "none" if first is None else first.dtype,
    float(sum(map(_ops.count_flops, source.nodes.values()))),
    float(moved_bytes(node, source.reads)),
  )


def moved_bytes(node: Step, reads: Iterable[Value]) -> int:
  """Returns the bytes that a kernel reads and writes, each array once."""
  if node.name == "gather":
    return 2 * node.outs[0].nbytes + _sum_bytes(node.arrays[1:])
  if node.name == "dynamic_update_slice":
    target, update, *places = node.arrays
    apart = {id(target), *map(id, places)}
    made_of = [v for v in reads if id(v) not in apart]
    return _read_bytes(made_of) + _sum_bytes([update])
  if writes_in_place(node.name):
    update = node.arrays[2]
    own = update.nbytes if update else 0
    return 3 * own + _sum_bytes(
      node.arrays[1:2]
    )  # The target's part: read and written.
  return _read_bytes(reads) + _sum_bytes(node.outs)


def _is_fused(node: Step, for_memory: bool) -> bool:
  return _ops.is_fusible(node) or (for_memory and node.name == _DRAW)


def _read_bytes(reads: Iterable[Value]) -> int:
  """Returns the bytes of arrays; overlapping views count at most the array."""
  seen: dict[Value, int] = {}
  for view in reads:
    seen[view.source] = seen.get(view.source, 0) + view.nbytes
  return sum(min(n, source.nbytes) for source, n in seen.items())


def _sum_bytes(values: Iterable[Value | None]) -> int:
  return sum(v.nbytes for v in values if v is not None)


def _find_written(program: _ops.CountedProgram, for_memory: bool) -> set[Value]:
  """Returns the elementwise results that have to be written to memory."""
  written = {v.source for v in program.outputs if v is not None}
  uniform = find_uniform(program)
  if for_memory:
    written.update(v.source for v in program.sealed)
    written.update(_find_draws(program, uniform))
  readers: dict[Value, list[int]] = {}
  for index, node in enumerate(program.steps):
    if node.name == "optimization_barrier" and for_memory:
      # What is behind a barrier reads its operands from memory.
      written.update(v.source for v in node.reads)
    if node.name in VIEWS:
      continue
    apart = not (_is_fused(node, for_memory) or _ops.is_reduction(node))
    remade = {node.arrays[i] for i in list_constant_operands(node, uniform)}
    for i, value in enumerate(node.arrays):
      if value is not None and value not in remade:
        readers.setdefault(value.source, []).append(index)
        if apart and (i == 0 or node.name != "dynamic_update_slice"):
          written.add(value.source)
  _write_shared(program, readers, written, for_memory)
  return written


def _find_draws(
  program: _ops.CountedProgram, uniform: Collection[Value]
) -> set[Value]:
  """Returns what is computed from random bits and seeds alone."""
  # Of a chain of operations this is the last one: a mask, not its bits.
  known = _find_seeds(program) | set(uniform)
  drawn: set[Value] = set()
  found: set[Value] = set()
  for node in program.steps:
    own = {v.source for v in node.reads} & drawn
    if node.name == _DRAW:
      drawn.update(node.outs)
    elif own and node.name not in VIEWS:
      others = [v for v in node.reads if v.source not in own]
      if _ops.is_fusible(node) and known.issuperset(others):
        drawn.update(node.outs)
      else:
        found |= own
  return found


def find_uniform(program: _ops.CountedProgram) -> set[Value]:
  """Returns the arrays of a program that have one constant in all places."""
  made = {
    step.outs[0]
    for step in program.steps
    if step.name == "broadcast_in_dim" and not step.reads
  }
  return made | program.uniform


def list_constant_operands(node: Step, uniform: Collection[Value]) -> list[int]:
  """Lists the operands of a loop that a compiler makes inside of it."""
  # XLA moves constants, and broadcasts of constants, into the bodies of loops,
  # where they are fused. JAX moves them out of bodies, as what no iteration
  # changes.
  if node.name != "scan":
    return []
  _, count, _ = core.scan_parts(node.params)
  arrays = enumerate(node.arrays[:count])
  return [i for i, v in arrays if v is not None and v.source in uniform]


def _write_shared(
  program: _ops.CountedProgram,
  readers: dict[Value, list[int]],
  written: set[Value],
  for_memory: bool,
) -> None:
  """Adds results that several kernels read and that are cheaper to write."""
  # `kernels[v]` are the kernels into which `v` ends up fused, found from the
  # end of the program. Computing `v` in each of them reads its operands that
  # often; writing it costs one write and one read per kernel.
  inputs: dict[Value, int] = {}
  fused: dict[Value, _Source] = {}
  nodes, uniform = program.steps, find_uniform(program)
  for index, node in enumerate(nodes):
    if _is_fused(node, for_memory) and node.outs[0] not in written:
      source = _collect_source(index, node, fused, uniform, program.uniform)
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
    is_dear = times * read > read + (1 + times) * own.nbytes
    is_costly = node.name in _ops.COSTLY
    if for_memory:
      is_costly &= program.has_barriers and read >= own.nbytes
    if times > 1 and (is_dear or is_costly):
      written.add(own)
    else:
      kernels[own] = frozenset(into)
