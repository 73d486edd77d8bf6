"""An op of jaxmotion's kernels, as checks and benches call it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.core import Array, PyTree, ShapedLike

IMPLEMENTATIONS = ("reference", "pallas_triton")

# Workers whose payloads are added.
_WORKERS = 8
_COLUMNS = 4096
# How a program calls a Triton kernel.
_TRITON = "__gpu$xla.gpu.triton"


class Op(NamedTuple):
  """An op that starts from one floating array.

  Attributes:
    name: of the op and its configuration.
    run: (like, *args, implementation=...) -> outputs; `like` is that array's
      shape and dtype.
    make: array -> the arguments of `run` after `like`.
    cases: arrays that it has to be right for.
    feed: (outputs, arguments) -> the arguments of the next call, for an op
      that continues from its outputs.
    view: (like, arguments, outputs) -> what of the outputs must be the same
      from every implementation.
    tolerance: largest relative difference of floats in it.
  """

  name: str
  run: Callable[..., PyTree]
  make: Callable[[Array], tuple[PyTree, ...]]
  cases: Mapping[str, Callable[[], np.ndarray]]
  feed: Callable[[PyTree, tuple], tuple] | None = None
  view: Callable[[ShapedLike, tuple, PyTree], PyTree] = lambda like, args, y: y
  tolerance: float = 0.0

  def step(
    self, like: ShapedLike, implementation: str | None
  ) -> Callable[..., PyTree]:
    """Returns (outputs of the last call, *args) -> outputs."""

    def call(last: PyTree, *args: PyTree) -> PyTree:
      args = args if self.feed is None else self.feed(last, args)
      return self.run(like, *args, implementation=implementation)

    return call

  def shapes(self, like: ShapedLike) -> tuple[tuple[PyTree, ...], PyTree]:
    """Returns the shapes and dtypes of arguments and outputs."""
    args = jax.eval_shape(self.make, like)
    run = lambda *args: self.run(like, *args, implementation="reference")
    return args, jax.eval_shape(run, *args)

  def default(self, like: ShapedLike) -> str:
    """Returns the implementation that it chooses on the default device."""
    if jax.default_backend() != "gpu":
      return "reference"
    run = lambda *args: self.run(like, *args, implementation=None)
    text = jax.jit(run).lower(*self.shapes(like)[0]).as_text()
    return "pallas_triton" if _TRITON in text else "reference"

  def ideal_bytes(self, like: ShapedLike) -> int:
    """Returns the bytes of what it takes and makes, each once."""
    leaves = jax.tree.leaves(self.shapes(like))
    return sum(a.size * a.dtype.itemsize for a in leaves)


def shape_of(size_bytes: int) -> tuple[int, int]:
  """The matrix of that many bytes of float32; it has rows of 4096 values."""
  return size_bytes // 4 // _COLUMNS, _COLUMNS


def alone(x: Array) -> tuple[PyTree, ...]:
  """The arguments of an op that takes the array as it is."""
  return (x,)


def stacked(encode: Callable[[Array], PyTree]) -> Callable[[Array], PyTree]:
  """Makes the payloads of several workers, each of other values."""

  def make(x: Array) -> PyTree:
    payloads = [
      encode(x * jnp.asarray(1 + w, x.dtype)) for w in range(_WORKERS)
    ]
    return jax.tree.map(lambda *a: jnp.stack(a), *payloads)

  return make
