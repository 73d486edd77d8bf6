"""One op of jaxmotion's kernels, as checks and timings call it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.core import Array, PyTree, ShapedLike

IMPLEMENTATIONS = ("reference", "pallas_triton")

# Number of workers whose payloads are added.
_WORKERS = 8
_COLUMNS = 4096
# Target of the custom call of a Triton kernel.
_TRITON = "__gpu$xla.gpu.triton"


class Op(NamedTuple):
  """One op that starts from a floating array."""

  name: str  # Name of the op and its configuration.
  # Function (like, *args, implementation=...) -> outputs; `like` is the shape
  # and dtype of the array.
  run: Callable[..., PyTree]
  # Function from the array to the arguments of `run` after `like`.
  make: Callable[[Array], tuple[PyTree, ...]]
  # Functions that make the arrays to check.
  cases: Mapping[str, Callable[[], np.ndarray]]
  # Function (outputs, arguments) -> arguments of the next call, for an op that
  # continues from its outputs.
  feed: Callable[[PyTree, tuple], tuple] | None = None
  # Function (like, arguments, outputs) -> the part of the outputs that must be
  # equal for every implementation.
  view: Callable[[ShapedLike, tuple, PyTree], PyTree] = lambda like, args, y: y
  tolerance: float = 0.0  # Largest relative difference of floats in that part.

  def step(
    self, like: ShapedLike, implementation: str | None
  ) -> Callable[..., PyTree]:
    """Returns the function (outputs of the last call, *args) -> outputs."""

    def call(last: PyTree, *args: PyTree) -> PyTree:
      args = args if self.feed is None else self.feed(last, args)
      return self.run(like, *args, implementation=implementation)

    return call

  def shapes(self, like: ShapedLike) -> tuple[tuple[PyTree, ...], PyTree]:
    """Returns shapes and dtypes of the arguments and of the outputs."""
    args = jax.eval_shape(self.make, like)
    run = lambda *args: self.run(like, *args, implementation="reference")
    return args, jax.eval_shape(run, *args)

  def default(self, like: ShapedLike) -> str:
    """Returns the implementation that the op chooses on the default device."""
    if jax.default_backend() != "gpu":
      return "reference"
    run = lambda *args: self.run(like, *args, implementation=None)
    text = jax.jit(run).lower(*self.shapes(like)[0]).as_text()
    return "pallas_triton" if _TRITON in text else "reference"

  def ideal_bytes(self, like: ShapedLike) -> int:
    """Returns the bytes of arguments and outputs, each counted once."""
    leaves = jax.tree.leaves(self.shapes(like))
    return sum(a.size * a.dtype.itemsize for a in leaves)


def make_shape(size_bytes: int) -> tuple[int, int]:
  """Returns the shape of a float32 matrix with rows of 4096 elements."""
  return size_bytes // 4 // _COLUMNS, _COLUMNS


def take_array(x: Array) -> tuple[PyTree, ...]:
  """Returns the arguments of an op that takes only the array."""
  return (x,)


def stack_payloads(
  encode: Callable[[Array], PyTree],
) -> Callable[[Array], PyTree]:
  """Returns a function that makes payloads of workers with different arrays."""

  def make(x: Array) -> PyTree:
    payloads = [
      encode(x * jnp.asarray(1 + w, x.dtype)) for w in range(_WORKERS)
    ]
    return jax.tree.map(lambda *a: jnp.stack(a), *payloads)

  return make
