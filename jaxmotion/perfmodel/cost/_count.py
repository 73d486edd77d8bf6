"""Counts FLOPs, bytes and memory of any JAX function from its trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxmotion import core
from jaxmotion.perfmodel.cost import (
  _assumptions,
  _cost,
  _fusion,
  _liveness,
  _ops,
  _trace,
)
from jaxmotion.program import LOOPS, VIEWS, Step, Value, inner_jaxprs

# Reshaping a row-major array moves nothing even as a kernel of its own.
_FREE = VIEWS - {"dynamic_slice", "slice", "split", "transpose", "unstack"}


def predict_cost(
  fn: Callable[..., Any],
  *args: Any,
  while_trips: int | Mapping[str, int] | None = None,
  branch_shares: Sequence[float] | None = None,
  backend: str | None = None,
) -> _cost.Cost:
  """Counts FLOPs, bytes and memory of one execution of any JAX function.

  The function is traced and never run: its arrays and devices need not exist.
  Calls (`jit`, `remat`, `custom_vjp`, `shard_map`...) are entered; inside a
  `shard_map` the cost is that of one device. The body of a `scan` counts as
  often as it runs.

  FLOPs are exact for matrix products (a multiplication and an addition are two)
  and convolutions. Padding, and the zeros that dilation inserts, are not
  multiplied. Other arithmetic counts one per element. Bytes are those of the
  fused program (see `docs/perfmodel.md` for the rule), and beside them those of
  a program that fuses nothing.

  Args:
    fn: the function, jitted or not.
    *args: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s.
    while_trips: trips of while loops whose number the trace does not state:
      one number for all, or a number for each name of a body's function. A
      `scan`, and a `fori_loop` with constant bounds, needs none.
    branch_shares: how often each branch is taken, adding up to 1, for every
      conditional of so many branches (a `cond` has the false one first). By
      default, and elsewhere, the branch of the most FLOPs and bytes is taken.
    backend: whose code `lax.platform_dependent` takes: "cpu", "cuda", "rocm" or
      "tpu"; None: that of this process.

  Returns:
    The cost.

  Raises:
    TypeError: `fn` is not a function, or `args` has a leaf that is no array.
    ValueError: a while loop has no trips (it is named). An argument names a
      loop that the program does not have, or a number of branches that it does
      not have.

  Example:
    >>> import jax
    >>> def layers(x, ws):
    ...   return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> ws = jax.ShapeDtypeStruct((10, 16, 16), "float32")
    >>> predict_cost(layers, x, ws).flops  # 10 of 2 * 8 * 16 * 16
    40960.0
  """
  core.check_callable("fn", fn)
  if not isinstance(fn, jax.stages.Wrapped):  # It may have static arguments.
    core.check_arrays("args", args)
  assumptions = _assumptions.Assumptions(while_trips, branch_shares, backend)
  program = _trace.trace_counted(fn, *args, backend=assumptions.backend)
  result = _count_program(program, assumptions, len(program.outputs))
  assumptions.check_used()
  return result


def _count_program(
  program: _trace.CountedProgram,
  assumptions: _assumptions.Assumptions,
  carried: int,
) -> _cost.Cost:
  """Returns the cost of a flat program."""
  total = _CostSum()
  for name in program.guessed:
    total.add_unknown(name, 1)
  for node in program.steps:
    total.add_step(node)
  done: dict[Value, int] = {}
  own_bytes: dict[Step, int] = {}
  steps, uniform = _fusion.fuse_kernels(program), _fusion.find_uniform(program)
  for step in steps:
    inner = _count_inner(step.node, assumptions, uniform)
    own_bytes[step.node] = sum(part.own_bytes for part in inner)
    for part in inner:
      total.add_inner(part.cost, part.times)
    if not inner:
      total.add_kernel(step.kernel)
    done.update(dict.fromkeys(step.node.outs, len(total.kernels)))
  # Outputs that no kernel makes are in memory from the start.
  written = [done.get(v.source, 0) if v else 0 for v in program.outputs]
  for index, kernel in _list_copies(program, carried):
    total.add_kernel(kernel)
    written[index] = len(total.kernels)
  return _cost.Cost(
    tuple(total.kernels),
    total.totals,
    tuple(written),
    _count_peak(program, own_bytes),
    total.unknown,
  )


def _count_peak(
  program: _trace.CountedProgram, own_bytes: dict[Step, int]
) -> int:
  """Returns the most bytes that are alive at once."""
  # Where no barrier forbids it, a compiler computes even costly elementwise
  # results in the backward pass again, rather than keep them from the forward
  # pass: it fuses them into their readers in both.
  steps = _fusion.fuse_kernels(program, for_memory=True)
  memory = _liveness.Liveness(program, steps)
  for index, step in enumerate(steps):
    memory.run_kernel(index, own_bytes.get(step.node, 0))
  return memory.peak_bytes


def _list_copies(
  program: _trace.CountedProgram, carried: int
) -> Iterator[tuple[int, _fusion.Kernel]]:
  """Yields the copies for results that are views of arrays in memory."""
  in_memory = set(program.inputs)
  for i, value in enumerate(program.outputs):
    if value is None:
      continue
    viewed = value.source in program.inputs and value is not value.source
    if viewed or (i >= carried and value.source in in_memory):
      yield (
        i,
        _fusion.Kernel("data_movement", value.dtype, 0.0, 2.0 * value.nbytes),
      )
    in_memory.add(value.source)


class _InnerProgram(NamedTuple):
  """One program inside an operation: a loop body, a branch.

  Attributes:
    cost: cost of one execution.
    times: number of executions.
    own_bytes: bytes that it needs besides its arguments.
  """

  cost: _cost.Cost
  times: float
  own_bytes: int


def _count_inner(
  node: Step, assumptions: _assumptions.Assumptions, uniform: Collection[Value]
) -> list[_InnerProgram]:
  """Returns the programs inside an operation; [] if it holds none."""
  bodies: Sequence[Any] = inner_jaxprs(node.eqn)
  if node.name == "while":
    bodies = [node.params[f"{p}_jaxpr"] for p in ("cond", "body")]
  sunk = _fusion.list_sunk(node, uniform)
  programs = [
    _trace.flatten_counted(body, assumptions.backend, sunk) for body in bodies
  ]
  carried = [len(p.outputs) for p in programs]
  times = [1.0] * len(programs)
  if node.name == "scan":
    # A stacked output has one more dimension outside the loop than inside.
    inside = [() if v is None else v.shape for v in programs[0].outputs]
    carried = [
      sum(a == v.shape for a, v in zip(inside, node.outs, strict=True))
    ]
    times = [node.params["length"]]
  elif node.name == "while":
    trips = assumptions.find_trips(node)
    times = [trips + 1, trips]
  costs = [
    _count_program(p, assumptions, count)
    for p, count in zip(programs, carried, strict=True)
  ]
  if node.name == "cond":
    heaviest = max(costs, key=lambda c: c.flops + c.bytes)
    shares = assumptions.find_shares(len(costs))
    times = list(shares or [float(c is heaviest) for c in costs])
  return [
    _InnerProgram(c, t, c.peak_bytes - _input_bytes(p))
    for c, t, p in zip(costs, times, programs, strict=True)
  ]


def _input_bytes(program: _trace.CountedProgram) -> int:
  held = (v for v in program.inputs if v not in program.uniform)
  return sum(v.nbytes for v in held)


class _CostSum:
  """Running sum of kernels, totals and unknown primitives."""

  def __init__(self) -> None:
    self.kernels: list[_fusion.Kernel] = []
    self.totals: dict[str, _cost.Total] = {}
    self.unknown: dict[str, float] = {}

  def add_kernel(self, kernel: _fusion.Kernel) -> None:
    self.kernels.append(kernel)
    moved = _cost.Total(0, 0, kernel.bytes * kernel.count, kernel.count)
    self._add_total(kernel.kind, moved, 1)

  def add_step(self, node: Step) -> None:
    """Adds the FLOPs and unfused bytes of one operation."""
    if inner_jaxprs(node.eqn):
      if node.name not in LOOPS:
        self.add_unknown(node.name, 1)
      return
    if node.name in _FREE:
      return
    if node.name in VIEWS:
      moved = 2 * sum(v.nbytes for v in node.outs)
    else:
      moved = _fusion.moved_bytes(node, [v for v in node.reads])
    self._add_total(
      _ops.kind_of(node), _cost.Total(_ops.count_flops(node), moved), 1
    )
    if not _ops.is_known(node):
      self.add_unknown(node.name, 1)

  def add_unknown(self, name: str, times: float) -> None:
    self.unknown[name] = self.unknown.get(name, 0) + times

  def add_inner(self, cost: _cost.Cost, times: float) -> None:
    for kernel in cost.kernels:
      self.kernels.append(kernel._replace(count=kernel.count * times))
    for kind, total in cost.totals.items():
      self._add_total(kind, total, times)
    for name, count in cost.unknown.items():
      self.add_unknown(name, count * times)

  def _add_total(self, kind: str, total: _cost.Total, times: float) -> None:
    old = self.totals.get(kind, _cost.Total())
    added = (a + times * b for a, b in zip(old, total, strict=True))
    self.totals[kind] = _cost.Total(*added)
