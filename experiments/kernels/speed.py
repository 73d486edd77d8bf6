"""Times of ops and peers on this device, over those of a copy."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from experiments.common import timing
from experiments.kernels import ops, peers
from jaxmotion.core import Array, PyTree, ShapedLike


class Ratio(NamedTuple):
  """One ratio of times within a repeat."""

  value: float  # Median over the repeats.
  noise: float  # Sample standard deviation over the repeats.


class Speed(NamedTuple):
  """Speed of one implementation of an op, or of a peer, on one array."""

  op: str  # Name of the op.
  size_bytes: int  # Bytes of the array that the op starts from.
  case: str  # Name of the implementation or of the peer.
  is_default: bool = False  # Whether the op chooses this implementation here.
  # Bytes of the op's arguments and outputs over its time, GB/s; None if it was
  # not measured.
  rate: float | None = None
  # Bytes that a copy read and wrote over its time, GB/s.
  copy_rate: float | None = None
  fraction: Ratio | None = None  # `rate` over `copy_rate`, within a repeat.
  # Time of the reference over the time, within a repeat.
  speedup: Ratio | None = None
  reason: str = ""  # Why it was not measured.


class Prepared(NamedTuple):
  """One op compiled for arrays of one shape."""

  op: ops.Op  # The op that was compiled.
  size_bytes: int  # Bytes of its arguments and outputs.
  default: str  # Name of the implementation that it chooses.
  # Function from the array to the arguments.
  make: Callable[[Array], tuple[PyTree, ...]]
  outputs: PyTree  # Shapes and dtypes of the outputs.
  # Function (outputs of the last call, *arguments) -> outputs of each
  # implementation.
  steps: dict[str, Callable[..., PyTree]]
  # Reason why an implementation does not take such arrays.
  missing: dict[str, str]


def list_implementations() -> tuple[str, ...]:
  """Returns the names of the implementations that the default device runs."""
  on_gpu = jax.default_backend() == "gpu"
  return ops.IMPLEMENTATIONS if on_gpu else ("reference",)


def compile_op(op: ops.Op, like: ShapedLike) -> Prepared:
  """Compiles an op for arrays of one shape, on the default device."""
  args, outputs = op.shapes(like)
  steps: dict[str, Callable[..., PyTree]] = {}
  missing = {}
  for name in list_implementations():
    step = jax.jit(op.step(like, name), donate_argnums=0, keep_unused=True)
    try:
      steps[name] = step.lower(outputs, *args).compile()
    except NotImplementedError as reason:
      missing[name] = str(reason)
  return Prepared(
    op,
    op.ideal_bytes(like),
    op.default(like),
    jax.jit(op.make).lower(like).compile(),
    outputs,
    steps,
    missing,
  )


def time_op(prepared: Prepared, x: Array, repeats: int) -> list[Speed]:
  """Times every implementation of an op, and its peers, on one array."""
  op, size = prepared.op, prepared.size_bytes
  args = prepared.make(x)
  cases = {
    **peers.build_peers(op.name, x),
    **{
      name: timing.InPlace(step, prepared.outputs, args)
      for name, step in prepared.steps.items()
    },
  }
  times = timing.measure_times(
    {"copy": timing.make_copy(size), **cases}, repeats
  )
  copy_rate = size / times.median("copy") / 1e6
  measured = [
    Speed(
      op.name,
      x.nbytes,
      name,
      name == prepared.default,
      size / times.median(name) / 1e6,
      copy_rate,
      Ratio(*times.ratio(name, "copy")),
      Ratio(*times.ratio(name, "reference")),
    )
    for name in cases
  ]
  missing = [
    Speed(op.name, x.nbytes, name, reason=reason)
    for name, reason in prepared.missing.items()
  ]
  return measured + missing
