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

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxmotion import core
from jaxmotion.perfmodel import _ops
from jaxmotion.program import VIEWS, Step, Value, writes_in_place

_DRAW = "random_bits"
# Arrays of at most so many bytes count as seeds: a key of random numbers, an
# index of a layer. Memory for them is nothing beside what is made of them.
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

  # Arrays in memory that the result is computed from.
  reads: dict[Value, None]
  # Operations by their position in the program.
  nodes: dict[int, Step]


def fuse_kernels(
  program: _ops.CountedProgram, for_memory: bool = False
) -> list[KernelStep]:
  """Groups the operations of a program into kernels, in program order."""
  # for_memory: whether the peak of memory is asked for instead of the seconds.
  # Random bits are then fused like arithmetic, and what a barrier stands before
  # is in memory.
  return _Fusion(program, for_memory).list_kernels()


class _Fusion:
  """Decides which results of a program are written, and forms its kernels."""

  def __init__(self, program: _ops.CountedProgram, for_memory: bool):
    self._program, self._for_memory = program, for_memory
    # What a compiler may compute in its readers.
    self._fusible = {
      node
      for node in program.steps
      if (for_memory and node.name == _DRAW) or _ops.is_fusible(node)
    }
    self._seeds = self._find_seeds()
    self._written = self._find_written()
    self._write_shared()

  def list_kernels(self) -> list[KernelStep]:
    """Returns a kernel for each result that is written."""
    fused: dict[Value, _Source] = {}
    steps = []
    for index, node in enumerate(self._program.steps):
      if node.name in VIEWS:
        continue
      source = self._collect_source(index, node, fused)
      is_fused = node in self._fusible
      if is_fused and node.outs[0] not in self._written:
        fused[node.outs[0]] = source
      else:
        reads = tuple({v.source: None for v in source.reads})
        is_source = is_fused and self._seeds.issuperset(source.reads)
        kernel = _make_kernel(node, source)
        steps.append(KernelStep(node, kernel, reads, is_source))
    return steps

  def _collect_source(
    self, index: int, node: Step, fused: dict[Value, _Source]
  ) -> _Source:
    """Returns the operations and arrays that an operation is fused with."""
    reads: dict[Value, None] = {}
    nodes = {index: node}
    remade = list_constant_operands(node, self._program.uniform)
    for i, value in enumerate(node.arrays):
      if value is None or value.source in self._program.remade or i in remade:
        continue
      if value.source in fused:
        reads.update(fused[value.source].reads)
        nodes.update(fused[value.source].nodes)
      else:
        reads[value] = None
    return _Source(reads, nodes)

  def _find_seeds(self) -> set[Value]:
    """Returns the small arrays that are known before anything large is."""
    # They follow from arguments as small as they are, behind no barrier.
    known = {v for v in self._program.inputs if v.nbytes <= _SEED_BYTES}
    for step in self._program.steps:
      if step.name != "optimization_barrier" and known.issuperset(step.reads):
        known.update(v for v in step.outs if v.nbytes <= _SEED_BYTES)
    return known

  def _find_written(self) -> set[Value]:
    """Returns the results that a single reader already needs in memory."""
    program = self._program
    written = {v.source for v in program.outputs if v is not None}
    if self._for_memory:
      written.update(v.source for v in program.sealed)
      written.update(self._find_draws())
    for node in program.steps:
      if node.name == "optimization_barrier" and self._for_memory:
        # What is behind a barrier reads its operands from memory.
        written.update(v.source for v in node.reads)
      if node.name not in VIEWS and not (
        node in self._fusible or _ops.is_reduction(node)
      ):
        written.update(
          value.source
          for i, value in enumerate(self._read_arrays(node))
          if value is not None
          and (i == 0 or node.name != "dynamic_update_slice")
        )
    return written

  def _read_arrays(self, node: Step) -> Sequence[Value | None]:
    """Returns the operands by position, None for what the reader remakes."""
    remade = list_constant_operands(node, self._program.uniform)
    if not remade:
      return node.arrays
    constants = {node.arrays[i] for i in remade}
    return [None if v in constants else v for v in node.arrays]

  def _find_draws(self) -> set[Value]:
    """Returns what is computed from random bits and seeds alone."""
    # Of a chain of operations this is the last one: a mask, not its bits.
    known = self._seeds | self._program.uniform
    drawn: set[Value] = set()
    last: set[Value] = set()
    for node in self._program.steps:
      own = {v.source for v in node.reads} & drawn
      if node.name == _DRAW:
        drawn.update(node.outs)
      elif own and node.name not in VIEWS:
        others = [v for v in node.reads if v.source not in own]
        if _ops.is_fusible(node) and known.issuperset(others):
          drawn.update(node.outs)
        else:
          last |= own
    return last

  def _write_shared(self) -> None:
    """Adds results that several kernels read and that are cheaper to write."""
    # Computing a result in each of its kernels reads its operands that often;
    # writing it costs one write and one read per kernel. `kernels[v]` are the
    # kernels into which `v` ends up fused, found from the end of the program.
    nodes = self._program.steps
    readers: dict[Value, list[int]] = {}
    fused: dict[Value, _Source] = {}
    for index, node in enumerate(nodes):
      if node.name in VIEWS:
        continue
      for value in self._read_arrays(node):
        if value is not None:
          readers.setdefault(value.source, []).append(index)
      if node in self._fusible and node.outs[0] not in self._written:
        fused[node.outs[0]] = self._collect_source(index, node, fused)
    kernels: dict[Value, frozenset[int]] = {}
    for own, source in reversed(fused.items()):
      into = frozenset[int]().union(
        *(
          kernels.get(nodes[reader].outs[0], (reader,))
          for reader in readers.get(own, ())
        )
      )
      times, read_bytes = len(into), _read_bytes(source.reads)
      written_bytes = read_bytes + (1 + times) * own.nbytes
      is_costly = nodes[max(source.nodes)].name in _ops.COSTLY
      if self._for_memory:
        is_costly &= self._program.has_barriers and read_bytes >= own.nbytes
      if times > 1 and (times * read_bytes > written_bytes or is_costly):
        self._written.add(own)
      else:
        kernels[own] = into


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
  # node: the operation at its end. reads: the arrays that it reads.
  if node.name == "gather":
    # As much of the table is read as is written. The indices are read whole.
    return 2 * node.outs[0].nbytes + _sum_bytes(node.arrays[1:])
  if node.name == "dynamic_update_slice":
    # What makes the update is read, and it is written into the target's buffer.
    target, update, *places = node.arrays
    others = {id(target), *map(id, places)}
    update_reads = [v for v in reads if id(v) not in others]
    return _read_bytes(update_reads) + _sum_bytes([update])
  if writes_in_place(node.name):  # A scatter.
    update = node.arrays[2]
    # The update is read, and its part of the target read and written.
    touched = 3 * update.nbytes if update else 0
    return touched + _sum_bytes(node.arrays[1:2])
  return _read_bytes(reads) + _sum_bytes(node.outs)


def _read_bytes(reads: Iterable[Value]) -> int:
  """Returns the bytes of arrays; overlapping views count at most the array."""
  seen: dict[Value, int] = {}
  for view in reads:
    seen[view.source] = seen.get(view.source, 0) + view.nbytes
  return sum(min(n, source.nbytes) for source, n in seen.items())


def _sum_bytes(values: Iterable[Value | None]) -> int:
  return sum(v.nbytes for v in values if v is not None)


def list_constant_operands(node: Step, uniform: frozenset[Value]) -> list[int]:
  """Lists the operands of a loop that a compiler makes inside of it."""
  # XLA moves constants, and broadcasts of constants, into the bodies of loops,
  # where they are fused. JAX moves them out of bodies, as what no iteration
  # changes.
  if node.name != "scan":
    return []
  _, count, _ = core.scan_parts(node.params)
  arrays = enumerate(node.arrays[:count])
  return [i for i, v in arrays if v is not None and v.source in uniform]
