"""Arguments that refuse to be differentiated in forward mode."""

import functools
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from jaxmotion import core
from jaxmotion.core import Array


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
