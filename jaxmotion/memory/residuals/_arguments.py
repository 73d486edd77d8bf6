"""Arguments of a traced function: arrays, constants, and their derivatives."""

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jaxmotion import core
from jaxmotion.core import Array, PyTree


class _Static:
  """A value that a trace sees as it is, whatever it is."""

  __slots__ = ("value",)

  def __init__(self, value: Any):
    self.value = value


class ArrayLeaves:
  """The arrays of a tree, apart from its other leaves.

  Modules hold strings, flags and functions beside their weights. These are
  constants of a trace.
  """

  def __init__(self, tree: PyTree):
    leaves, self._tree = jax.tree_util.tree_flatten_with_path(tree)
    found = [(path, x) for path, x in leaves if core.is_array(x)]
    self.paths = [path for path, _ in found]
    self.arrays = [x for _, x in found]  # Arrays, numbers or shapes.
    # None stands where an array was: no leaf is None.
    self._others = [None if core.is_array(x) else x for _, x in leaves]

  def take_arrays(self) -> list[Array]:
    """Returns the arrays and forgets them: tracers must not outlive a trace."""
    arrays, self.arrays = self.arrays, []
    return arrays

  def fill(self, arrays: Sequence[Array]) -> Any:
    """Returns the tree with these arrays; static leaves are unwrapped."""
    given = iter(arrays)
    leaves = [next(given) if x is None else x for x in self._others]
    leaves = [x.value if isinstance(x, _Static) else x for x in leaves]
    return jax.tree.unflatten(self._tree, leaves)


def mark_static(
  args: Sequence[PyTree], positions: Sequence[int]
) -> tuple[PyTree, ...]:
  """Returns the arguments with those at the positions as constants."""
  static = {i + len(args) if i < 0 else i for i in positions}
  return tuple(
    _Static(arg) if i in static else arg for i, arg in enumerate(args)
  )


def check_params(
  params: int | Sequence[int], count: int | None = None
) -> set[int]:
  """Returns the positions in `params`, checked."""
  # count: number of arguments, None before they are known.
  positions: list[Any] = (
    list(params) if isinstance(params, list | tuple | range) else [params]
  )
  of = "" if count is None else f"the {count} "
  message = f"`params` must be positions of {of}arguments, got {params!r}."
  if any(type(position) is not int for position in positions):
    raise TypeError(message)
  if any(p < 0 or (count is not None and p >= count) for p in positions):
    raise ValueError(message)
  return set(positions)


@functools.cache
def _make_primitive() -> Any:
  """Makes the operation that only transposed programs can do without."""
  # JAX refuses forward mode as well, but does not say whose it is. A tangent
  # of reverse mode is gone once the program is transposed.
  primitive = core.jax_core.Primitive("reverse_only")
  primitive.def_abstract_eval(lambda x: x)
  primitive.def_impl(refuse_forward_mode)
  mlir.register_lowering(primitive, refuse_forward_mode)
  ad.deflinear(primitive, lambda cotangent: [cotangent])
  batching.defvectorized(primitive)
  return primitive


def refuse_forward_mode(*_: Any, **__: Any) -> NoReturn:
  """Raises the error for a tangent that is to be computed."""
  raise TypeError(
    "A function wrapped in `compress_residuals` has no forward mode (`jvp`, "
    "`jacfwd`, `linearize`), because it saves for a backward pass. "
    "Differentiate it with `grad` or `vjp`, or call the function itself."
  )


@jax.custom_jvp
def reverse_only(arrays: list[Array]) -> list[Array]:
  """Returns the arrays, differentiable in reverse mode alone."""
  return arrays


def _push_forward(primals: Any, tangents: Any) -> Any:
  """Marks all tangents that are no zeros by `reverse_only`'s primitive."""
  (arrays,), (tangents,) = primals, tangents
  marked = [
    t
    if isinstance(t, SymbolicZero) or t.dtype == jax.dtypes.float0
    else _make_primitive().bind(t)
    for t in tangents
  ]
  return arrays, marked


# Without symbolic zeros, all gradients would seem to be wanted.
reverse_only.defjvp(_push_forward, symbolic_zeros=True)
