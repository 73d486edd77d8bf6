"""Traces a function into operations, each with its class and FLOPs."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmotion import program

# Classes of operations, by which totals, curves and rates are found.
KINDS = (
  "matmul",
  "convolution",
  "elementwise",
  "reduction",
  "data_movement",
  "gather_scatter",
  "random",
  "collective",
  "other",
)
MATMULS = ("matmul", "convolution")

# Compilers write the results of these to memory rather than compute them in
# two kernels.
COSTLY = program.TRANSCENDENTAL | program.SPECIAL
# Constants, since unions of sets took longer than all the rest.
_PER_ELEMENT = program.ARITHMETIC | COSTLY | program.CUMULATIVE
_FUSIBLE = program.ARITHMETIC | COSTLY | program.MOVEMENT | {"integer_pow"}
_REDUCING = (
  program.REDUCTIONS
  | program.CUMULATIVE
  | program.WINDOWS
  | program.WINDOW_PICKS
)
_QUIET = program.AXIS_ONLY | {"platform_index"}

# A reduction of so few elements (the codes of a word) is fused into its
# readers: XLA computes it there rather than write its result.
_FUSED_REDUCTION_SIZE = 32
# Threefry-2x32 makes two words of 20 rounds (add, rotate, xor: 5 operations),
# 5 key injections (3) and 2 additions.
_RANDOM_WORD_FLOPS = (20 * 5 + 5 * 3 + 2) / 2


class CountedProgram(NamedTuple):
  """A flat program with all calls written out, without unused steps."""

  # Constants and arguments, in memory before the program starts.
  inputs: tuple[program.Value, ...]
  steps: tuple[program.Step, ...]
  # None is a constant of the text of the program.
  outputs: tuple[program.Value | None, ...]
  # Primitives that hold a jaxpr and are taken to run it once.
  guessed: tuple[str, ...]
  # Barriers hold the compiler to an order.
  has_barriers: bool
  # Inputs that a compiler makes inside of the program, and writes nowhere.
  remade: frozenset[program.Value]
  # These, and all that the program makes of one constant.
  uniform: frozenset[program.Value]
  # Views of arrays that a barrier of `jax.checkpoint` returns.
  sealed: frozenset[program.Value]


def trace_counted(
  fn: Callable[..., Any], *args: Any, backend: str
) -> CountedProgram:
  """Traces a function without running it."""
  traceable = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
  jaxpr = program.open_jaxpr(traceable.trace(*args).jaxpr)
  wanted = [True] * len(jaxpr.outvars)
  # `flatten` drops unused steps as well, but does not look into loops.
  jaxpr, *_ = dce_jaxpr(jaxpr, wanted, instantiate=True)
  return flatten_counted(jaxpr, backend)


def flatten_counted(
  jaxpr: Any, backend: str, remade_inputs: Collection[int] = ()
) -> CountedProgram:
  """Flattens a jaxpr, its constants among the inputs."""
  # remade_inputs: positions of a loop body's inputs that are made inside.
  flat = program.flatten(jaxpr, calls="all", backend=backend)
  remade = frozenset(flat.inputs[i] for i in remade_inputs)
  # Constants of inlined calls are no arrays of the caller's.
  own = list(flat.constants)[: len(program.open_jaxpr(jaxpr).constvars)]
  outputs = (v if isinstance(v, program.Value) else None for v in flat.outputs)
  return CountedProgram(
    (*own, *flat.inputs),
    flat.steps,
    tuple(outputs),
    flat.guessed,
    program.has_barriers(jaxpr),
    remade,
    remade.union(_find_filled(flat.steps)),
    flat.sealed,
  )


def join_steps(
  inputs: Iterable[program.Value],
  steps: Sequence[program.Step],
  outputs: Iterable[program.Value],
) -> CountedProgram:
  """Returns steps of a flat program as a program of their own."""
  filled = frozenset(_find_filled(steps))
  return CountedProgram(
    tuple(inputs),
    tuple(steps),
    tuple(outputs),
    guessed=(),
    has_barriers=False,
    remade=frozenset(),
    uniform=filled,
    sealed=frozenset(),
  )


def _find_filled(steps: Iterable[program.Step]) -> Iterator[program.Value]:
  """Yields arrays that are made of one constant."""
  for step in steps:
    if step.name == "broadcast_in_dim" and not step.reads:
      yield step.outs[0]


def kind_of(step: program.Step) -> str:
  """Returns the class of an operation, one of `KINDS`, which has its rate."""
  name = step.name
  if name == "dot_general":
    return "matmul"
  if name == "conv_general_dilated":
    return "convolution"
  if name in _REDUCING:
    return "reduction"
  if is_fusible(step):
    return "data_movement" if name in program.MOVEMENT else "elementwise"
  if name == "gather" or name.startswith("scatter"):
    return "gather_scatter"
  if name in program.VIEWS or name == "dynamic_update_slice":
    return "data_movement"
  if name in program.RANDOM:
    return "random"
  # It names a mesh axis and moves bytes over it.
  is_bound = any(isinstance(axis, str) for axis in step.axis_names)
  return "collective" if is_bound and name not in _QUIET else "other"


def is_fusible(step: program.Step) -> bool:
  """Says whether an operation is fused into the kernels that read it."""
  name = step.name
  if is_reduction(step):
    return (
      len(step.outs) == 1
      and _operand_size(step) <= _FUSED_REDUCTION_SIZE * step.outs[0].size
    )
  return name in _FUSIBLE


def is_reduction(step: program.Step) -> bool:
  """Says whether an operation reads fused operands and writes few elements."""
  return step.name in program.REDUCTIONS


def is_known(step: program.Step) -> bool:
  """Says whether `count_flops` knows the FLOPs of an operation."""
  special = ("sort", "top_k", "fft")
  return kind_of(step) != "other" or step.name in _QUIET or step.name in special


def count_flops(step: program.Step) -> float:
  """Returns the FLOPs of an operation: 1 per element unless stated here."""
  name, size = step.name, step.outs[0].size if step.outs else 0
  if name == "dot_general":
    (contracted, _), _ = step.params["dimension_numbers"]
    lhs = step.arrays[0]
    depth = math.prod(lhs.shape[i] for i in contracted) if lhs else 1
    return 2 * size * depth
  if name == "conv_general_dilated":
    return _convolution_flops(step)
  if name in _PER_ELEMENT:
    return size
  if name == "integer_pow":
    power = abs(step.params["y"])
    return size * max(power.bit_length() + power.bit_count() - 2, 0)
  if name in program.REDUCTIONS:
    # A `reduce` combines two elements by the equations of its jaxpr.
    folds = len(step.params["jaxpr"].eqns) if name == "reduce" else 1
    return folds * max(_operand_size(step) - size, 0)
  if name in program.WINDOWS:
    return size * (math.prod(step.params["window_dimensions"]) - 1)
  if name in program.WINDOW_PICKS:  # One operand has a value for each window.
    windows = min(v.size for v in (*step.arrays, *step.outs) if v is not None)
    return windows * math.prod(step.params["window_dimensions"])
  if name.startswith("scatter") and name != "scatter":
    return step.arrays[2].size if step.arrays[2] else 1
  if name in program.RANDOM:
    return _RANDOM_WORD_FLOPS * sum(v.nbytes for v in step.outs) / 4
  each = 0.0  # FLOPs of each element of an operand.
  match name:
    case "sort":
      first, axis = step.arrays[0], step.params["dimension"]
      each = math.log2(max(first.shape[axis], 1) if first else 1)
    case "top_k":
      each = math.log2(step.params["k"] + 1)
    case "fft":
      each = 5 * sum(map(math.log2, step.params["fft_lengths"]))
  return each * _operand_size(step) if each else 0.0


def _operand_size(step: program.Step) -> int:
  return max((v.size for v in step.arrays if v is not None), default=0)


def _convolution_flops(step: program.Step) -> float:
  """Returns 2 FLOPs for each product of an input element with a weight."""
  # Padding, and the zeros that dilation inserts, are not multiplied: the
  # forward pass and both gradients then have exactly equal FLOPs.
  params = step.params
  numbers = params["dimension_numbers"]
  lhs, rhs = step.arrays[0], step.arrays[1]
  assert lhs and rhs
  out = step.outs[0]
  channels = rhs.shape[numbers.rhs_spec[1]]  # of one group
  products = out.shape[numbers.out_spec[0]] * out.shape[numbers.out_spec[1]]
  for i, (low, _) in enumerate(params["padding"]):
    products *= _count_taps(
      out.shape[numbers.out_spec[2 + i]],
      rhs.shape[numbers.rhs_spec[2 + i]],
      lhs.shape[numbers.lhs_spec[2 + i]],
      params["window_strides"][i],
      low,
      params["lhs_dilation"][i],
      params["rhs_dilation"][i],
    )
  return 2 * products * channels


@functools.lru_cache(maxsize=4096)
def _count_taps(
  outs: int, taps: int, ins: int, stride: int, low: int, spread: int, step: int
) -> int:
  """Counts pairs (output, tap) of one dimension that meet an input element."""
  # low: padding before the input. spread, step: dilation of input and kernel.
  starts = np.arange(outs) * stride - low
  place = starts[:, None] + np.arange(taps) * step
  inside = (place >= 0) & (place <= (ins - 1) * spread)
  return int(np.sum(inside & (place % spread == 0)))
