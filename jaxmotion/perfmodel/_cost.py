"""Counts FLOPs, bytes and memory of any JAX function from its trace."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxmotion import core, hosts
from jaxmotion.perfmodel import _fusion, _liveness, _ops
from jaxmotion.program import (
  LOOPS,
  VIEWS,
  Step,
  Value,
  describe_equation,
  inner_jaxprs,
)

# Reshaping a row-major array moves nothing even as a kernel of its own.
_FREE = VIEWS - {"dynamic_slice", "slice", "split", "transpose", "unstack"}
_BACKENDS = ("cpu", "cuda", "rocm", "tpu")


class Total(NamedTuple):
  """Totals over all operations of one class.

  Args:
    flops: FLOPs; each operation counts once, into however many kernels it is
      fused.
    unfused_bytes: bytes moved if every operation were a kernel of its own.
    bytes: bytes moved by the kernels that end in an operation of this class.
    kernels: number of those kernels.

  Example:
    >>> from jaxmotion import perfmodel
    >>> x = jax.ShapeDtypeStruct((128, 128), "float32")
    >>> cost = perfmodel.predict_cost(jnp.matmul, x, x)
    >>> sorted(cost.totals), cost.totals["matmul"].flops
    (['matmul'], 4194304.0)
  """

  flops: float = 0.0
  unfused_bytes: float = 0.0
  bytes: float = 0.0
  kernels: float = 0.0


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs, bytes and memory of one execution of a function.

  Args:
    kernels: kernels in program order; those of a loop's body have the loop's
      trips as count.
    totals: totals of every operation class that occurs.
    written: for each leaf of the result, the number of kernels after which
      it is in memory.
    peak_bytes: most bytes of arguments, results and temporaries at once.
    unknown: number of operations per primitive whose FLOPs are unknown
      (counted as 0), or that is taken to run the program it holds once.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost
    >>> a = jax.ShapeDtypeStruct((64, 32), "float32")
    >>> b = jax.ShapeDtypeStruct((32, 16), "float32")
    >>> print(predict_cost(lambda a, b: jax.nn.relu(a @ b), a, b))
    kind         flops  bytes  unfused_bytes  kernels
    matmul       65536  14336          14336        1
    elementwise   1024   8192           8192        1
    total        66560  22528          22528        2
  """

  kernels: tuple[_fusion.Kernel, ...]
  totals: Mapping[str, Total]
  written: tuple[int, ...]
  peak_bytes: int
  unknown: Mapping[str, float]

  @property
  def flops(self) -> float:
    """FLOPs of all operations, each counted once."""
    return math.fsum(total.flops for total in self.totals.values())

  @property
  def bytes(self) -> float:
    """Bytes between memory and processor, of the fused program."""
    return math.fsum(kernel.bytes * kernel.count for kernel in self.kernels)

  @property
  def unfused_bytes(self) -> float:
    """Bytes if every operation read and wrote memory: an upper bound."""
    return math.fsum(total.unfused_bytes for total in self.totals.values())

  def __str__(self) -> str:
    header = ("kind", "flops", "bytes", "unfused_bytes", "kernels")
    rows: list[tuple[str, ...]] = [header]
    every = Total(*map(math.fsum, zip(*self.totals.values(), strict=True)))
    for kind in (*_ops.KINDS, "total"):
      total = every if kind == "total" else self.totals.get(kind)
      if total is not None:
        values = (total.flops, total.bytes, total.unfused_bytes, total.kernels)
        rows.append((kind, *(f"{value:.10g}" for value in values)))
    return core.text_table(rows, right=range(1, len(header)))


check_cost = core.instance(Cost, "a Cost, as `predict_cost` returns it")


@core.declare(
  fn=core.function,
  while_trips=core.optional(core.integer(0)),
  backend=core.optional(core.choice(_BACKENDS)),
)
def predict_cost(
  fn: Callable[..., Any],
  *args: Any,
  while_trips: int | None = None,
  backend: str | None = None,
) -> Cost:
  """Counts FLOPs, bytes and memory of one execution of any JAX function.

  The function is traced and never run: its arrays and devices need not exist.
  Calls (`jit`, `remat`, `custom_vjp`, `shard_map`...) are entered; inside a
  `shard_map` the cost is that of one device. The body of a `scan` counts as
  often as it runs. Of a `cond`, the branch of the most FLOPs and bytes counts.

  FLOPs are exact for matrix products (a multiplication and an addition are two)
  and convolutions. Padding, and the zeros that dilation inserts, are not
  multiplied. Other arithmetic counts one per element. Bytes are those of the
  fused program (see `docs/perfmodel.md` for the rule), and beside them those of
  a program that fuses nothing.

  Args:
    fn: the function, jitted or not.
    *args: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s.
    while_trips: trips of every while loop whose number the trace does not
      state. A `scan`, and a `fori_loop` with constant bounds, needs none.
    backend: whose code `lax.platform_dependent` takes: "cpu", "cuda", "rocm" or
      "tpu"; None: that of this process.

  Returns:
    The cost.

  Raises:
    TypeError: `fn` is not a function, or `args` has a leaf that is no array.
    ValueError: a while loop has no trips (it is named), or `backend` is
      unknown.

  Example:
    >>> import jax
    >>> def layers(x, ws):
    ...   return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> ws = jax.ShapeDtypeStruct((10, 16, 16), "float32")
    >>> predict_cost(layers, x, ws).flops  # 10 of 2 * 8 * 16 * 16
    40960.0
  """
  if not isinstance(fn, jax.stages.Wrapped):  # It may have static arguments.
    core.arrays("args", args)
  if backend is None:
    backend = jax.default_backend()
  program = _ops.trace_counted(fn, *args, backend=backend)
  loops = _Loops(while_trips, backend)
  return _count_program(program, loops, len(program.outputs))


class _Loops(NamedTuple):
  """Facts that no trace states."""

  while_trips: int | None
  backend: str

  def find_trips(self, step: Step) -> int:
    """Returns the trips of a while loop."""
    if step.params["body_jaxpr"].jaxpr.debug_info.func_name == hosts.RUN_ONCE:
      return 1
    if self.while_trips is None:
      raise ValueError(
        "`while_trips` must give the number of trips of every while loop; "
        f"{describe_equation(step.eqn)} has none, got None."
      )
    return self.while_trips


def _count_program(
  program: _ops.CountedProgram, loops: _Loops, carried: int
) -> Cost:
  """Returns the cost of a flat program."""
  # carried: number of results, the first ones, that a loop carries on.
  sums, written, own_bytes = _count_kernels(program, loops, carried)
  sums.unknown.update(program.guessed)
  for node in program.steps:
    sums.add_step(node)
  return Cost(
    tuple(sums.kernels),
    sums.totals,
    tuple(written),
    _find_peak(program, own_bytes),
    dict(sums.unknown),
  )


def count_steps(
  program: _ops.CountedProgram,
) -> tuple[list[_fusion.Kernel], float]:
  """Counts kernels and FLOPs of steps that a caller put together."""
  # A while loop counts once.
  sums = _count_kernels(program, _Loops(1, jax.default_backend()), 0)[0]
  flops = [total.flops for total in sums.totals.values()]  # Of loops.
  flops += map(_ops.count_flops, program.steps)
  return sums.kernels, math.fsum(flops)


def count_peak(program: _ops.CountedProgram) -> int:
  """Returns the most bytes of steps without loops, put together by a caller."""
  return _find_peak(program, {})


def _find_peak(
  program: _ops.CountedProgram, own_bytes: Mapping[Step, int]
) -> int:
  """Returns the most bytes that a program holds at once."""
  # own_bytes: of loops and branches, what is in memory inside.
  # Where no barrier forbids it, a compiler computes even costly elementwise
  # results in the backward pass again, rather than keep them from the forward
  # pass: it fuses them into their readers in both. So kernels are formed anew.
  steps = _fusion.fuse_kernels(program, for_memory=True)
  memory = _liveness.Liveness(program, steps)
  for index, step in enumerate(steps):
    memory.run_kernel(index, own_bytes.get(step.node, 0))
  return memory.peak_bytes


def _count_kernels(
  program: _ops.CountedProgram, loops: _Loops, carried: int
) -> tuple["_CostSum", list[int], dict[Step, int]]:
  """Counts kernels, until which each result is written, and bytes inside."""
  sums = _CostSum()
  kernels_until: dict[Value, int] = {}
  own_bytes: dict[Step, int] = {}
  steps = _fusion.fuse_kernels(program)
  for step in steps:
    inner = _count_inner(step.node, loops, program.uniform)
    own_bytes[step.node] = sum(one.own_bytes for one in inner)
    for stack in _liveness.list_stacks(step.node):
      sums.add_kernel(_move_bytes(stack, stack.nbytes))  # Filled with zeros.
    for one in inner:
      sums.add_inner(one.cost, one.times)
    if not inner:
      sums.add_kernel(step.kernel)
    kernels_until.update(dict.fromkeys(step.node.outs, len(sums.kernels)))
  # Outputs that no kernel makes are in memory from the start.
  written = [
    kernels_until.get(v.source, 0) if v else 0 for v in program.outputs
  ]
  for index, value in _list_copies(program, carried, steps):
    sums.add_kernel(_move_bytes(value, 2 * value.nbytes))  # Read and written.
    written[index] = len(sums.kernels)
  return sums, written, own_bytes


def _move_bytes(value: Value, nbytes: float) -> _fusion.Kernel:
  """Returns a kernel that moves bytes of an array, and computes nothing."""
  return _fusion.Kernel("data_movement", value.dtype, 0.0, float(nbytes))


def _list_copies(
  program: _ops.CountedProgram,
  carried: int,
  steps: Sequence[_fusion.KernelStep],
) -> Iterator[tuple[int, Value]]:
  """Yields results that are copied into their buffers, and their positions."""
  # carried: how many results a loop carries on, which may stay where they are.
  # Every other result has a buffer of its own: a view of an argument is copied,
  # and so is what is returned twice. What a loop stacks is written to its place
  # in the stack by the kernel that makes it, if nothing else reads it and that
  # is no matmul.
  in_memory = {*program.inputs, *(v for step in steps for v in step.reads)}
  for step in steps:
    if not _ops.is_fusible(step.node):
      in_memory.update(step.node.outs)
  for i, value in enumerate(program.outputs):
    if value is None:
      continue
    viewed = value.source in program.inputs and value is not value.source
    if viewed or (i >= carried and value.source in in_memory):
      yield i, value
    in_memory.add(value.source)


class _InnerProgram(NamedTuple):
  """One program inside an operation: a loop body, a branch."""

  cost: Cost
  times: float
  # Bytes that it needs besides its arguments.
  own_bytes: int


def _count_inner(
  node: Step, loops: _Loops, uniform: frozenset[Value]
) -> list[_InnerProgram]:
  """Counts the programs inside an operation, and how often each one runs."""
  bodies: Sequence[Any] = inner_jaxprs(node.eqn)
  if node.name == "while":
    bodies = [node.params[f"{p}_jaxpr"] for p in ("cond", "body")]
  remade = _fusion.list_constant_operands(node, uniform)
  programs = [_ops.flatten_counted(b, loops.backend, remade) for b in bodies]
  carried = [len(p.outputs) for p in programs]
  times = [1.0] * len(programs)
  if node.name == "scan":
    carried = [len(node.outs) - len(_liveness.list_stacks(node))]
    times = [node.params["length"]]
  elif node.name == "while":
    trips = loops.find_trips(node)
    times = [trips + 1, trips]
  costs = [
    _count_program(p, loops, count)
    for p, count in zip(programs, carried, strict=True)
  ]
  if node.name == "cond":
    heaviest = max(costs, key=lambda c: c.flops + c.bytes)
    times = [float(c is heaviest) for c in costs]
  inputs = [
    sum(v.nbytes for v in p.inputs if v not in p.remade) for p in programs
  ]
  return [
    _InnerProgram(c, t, c.peak_bytes - nbytes)
    for c, t, nbytes in zip(costs, times, inputs, strict=True)
  ]


class _CostSum:
  """Running sum of kernels, totals and unknown primitives."""

  def __init__(self) -> None:
    self.kernels: list[_fusion.Kernel] = []
    self.totals: dict[str, Total] = {}
    self.unknown: Any = collections.Counter()  # Operations, by primitive.

  def add_kernel(self, kernel: _fusion.Kernel) -> None:
    """Adds the bytes and launches of one kernel."""
    self.kernels.append(kernel)
    moved = Total(0, 0, kernel.bytes * kernel.count, kernel.count)
    self._add_total(kernel.kind, moved, 1)

  def add_step(self, node: Step) -> None:
    """Adds the FLOPs and unfused bytes of one operation."""
    if inner_jaxprs(node.eqn):
      if node.name not in LOOPS:
        self.unknown[node.name] += 1
      return
    if node.name in _FREE:
      return
    if node.name in VIEWS:
      moved = 2 * sum(v.nbytes for v in node.outs)
    else:
      moved = _fusion.moved_bytes(node, node.reads)
    total = Total(_ops.count_flops(node), moved)
    self._add_total(_ops.kind_of(node), total, 1)
    if not _ops.is_known(node):
      self.unknown[node.name] += 1

  def add_inner(self, cost: Cost, times: float) -> None:
    """Adds what a loop's body or a branch costs, as often as it runs."""
    for kernel in cost.kernels:
      self.kernels.append(kernel._replace(count=kernel.count * times))
    for kind, total in cost.totals.items():
      self._add_total(kind, total, times)
    for name, count in cost.unknown.items():
      self.unknown[name] += count * times

  def _add_total(self, kind: str, total: Total, times: float) -> None:
    old = self.totals.get(kind, Total())
    added = (a + times * b for a, b in zip(old, total, strict=True))
    self.totals[kind] = Total(*added)
