"""Times of ops and peers on this device, over those of a copy."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from experiments.common import timing
from experiments.kernels import ops, peers
from jaxmotion.core import Array, PyTree, ShapedLike


class Ratio(NamedTuple):
  """One ratio of times within a repeat.

  Attributes:
    value: median over the repeats.
    noise: sample standard deviation over the repeats.
  """

  value: float
  noise: float


class Speed(NamedTuple):
  """Speed of one implementation of an op, or of a peer, on one array.

  Attributes:
    op: name of the op.
    size_bytes: bytes of the array that the op starts from.
    case: name of the implementation or of the peer.
    is_default: whether the op chooses this implementation here.
    rate: bytes of the op's arguments and outputs over its time, GB/s; None if
      it was not measured.
    copy_rate: bytes that a copy read and wrote over its time, GB/s.
    fraction: `rate` over `copy_rate`, within a repeat.
    speedup: time of the reference over the time, within a repeat.
    reason: why it was not measured.
  """

  op: str
  size_bytes: int
  case: str
  is_default: bool = False
  rate: float | None = None
  copy_rate: float | None = None
  fraction: Ratio | None = None
  speedup: Ratio | None = None
  reason: str = ""


class Prepared(NamedTuple):
  """One op compiled for arrays of one shape.

  Attributes:
    op: the op that was compiled.
    size_bytes: bytes of its arguments and outputs.
    default: name of the implementation that it chooses.
    make: function from the array to the arguments.
    outputs: shapes and dtypes of the outputs.
    steps: function (outputs of the last call, *arguments) -> outputs of each
      implementation.
    missing: reason why an implementation does not take such arrays.
  """

  op: ops.Op
  size_bytes: int
  default: str
  make: Callable[[Array], tuple[PyTree, ...]]
  outputs: PyTree
  steps: dict[str, Callable[..., PyTree]]
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
