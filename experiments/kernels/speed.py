"""How fast an op is on this device."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from experiments.common.timing import InPlace, copy_of, measure
from experiments.kernels import peers
from experiments.kernels.ops import IMPLEMENTATIONS, Op
from jaxmotion.core import Array, PyTree, ShapedLike


class Ratio(NamedTuple):
  """A ratio of times within a repeat.

  Attributes:
    value: median.
    noise: sample standard deviation.
  """

  value: float
  noise: float


class Speed(NamedTuple):
  """How fast an implementation of an op, or a peer, was on an array.

  Attributes:
    op: name of the op.
    size_bytes: of the array that it starts from.
    case: the implementation or the peer.
    is_default: whether it is what the op chooses here.
    rate: bytes of the op's arguments and outputs over its time, GB/s; None if
      it was not measured.
    copy_rate: bytes that a copy read and wrote over its time, GB/s.
    fraction: of the copy's rate.
    speedup: over the reference.
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
  """An op compiled for arrays of one shape.

  Attributes:
    op: the op.
    size_bytes: of its arguments and outputs.
    default: implementation that it chooses.
    make: array -> arguments.
    outputs: their shapes and dtypes.
    steps: (outputs of the last call, *arguments) -> outputs, a function for
      each implementation.
    missing: why there is none.
  """

  op: Op
  size_bytes: int
  default: str
  make: Callable[[Array], tuple[PyTree, ...]]
  outputs: PyTree
  steps: dict[str, Callable[..., PyTree]]
  missing: dict[str, str]


def implementations() -> tuple[str, ...]:
  """Names of the implementations that the default device can run."""
  on_gpu = jax.default_backend() == "gpu"
  return IMPLEMENTATIONS if on_gpu else ("reference",)


def prepare(op: Op, like: ShapedLike) -> Prepared:
  """Compiles an op for arrays like this one, for the default device."""
  args, outputs = op.shapes(like)
  steps: dict[str, Callable[..., PyTree]] = {}
  missing = {}
  for name in implementations():
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
    **peers.build(op.name, x),
    **{
      name: InPlace(step, prepared.outputs, args)
      for name, step in prepared.steps.items()
    },
  }
  times = measure({"copy": copy_of(size), **cases}, repeats)
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
