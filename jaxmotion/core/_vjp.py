"""Vector-Jacobian products over the arguments that have gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.core import _types


def is_inexact(x: Any) -> bool:
  """Says whether an array of this type has a gradient.

  Args:
    x: array, number, ShapeDtypeStruct or abstract value.

  >>> is_inexact(1.0), is_inexact(1)
  (True, False)
  """
  dtype = x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype
  return jnp.issubdtype(dtype, jnp.inexact)


def float0_zeros(x: Any) -> np.ndarray:
  """Returns the cotangent that JAX expects of an integer or boolean output.

  Args:
    x: array, ShapeDtypeStruct or abstract value.

  >>> float0_zeros(jnp.arange(3)).shape
  (3,)
  """
  return np.zeros(x.shape, jax.dtypes.float0)


def vjp_inexact(
  fn: Callable[..., tuple[Sequence[_types.Array], _types.PyTree]],
  *args: _types.Array,
) -> tuple[
  Sequence[_types.Array],
  Callable[[Sequence[Any]], tuple[Any, ...]],
  _types.PyTree,
]:
  """Linearizes a function in its floating-point arguments only.

  `jax.vjp` refuses integer arguments without a cotangent of their own type;
  here they are held fixed.

  Args:
    fn: takes arrays, returns a list of arrays and a tree of further outputs.
    args: arrays of any dtype.

  Returns:
    The list of arrays, a function from their cotangents to the gradients of
    the floating-point arguments in order, and the further outputs.

  >>> out, pull, _ = vjp_inexact(lambda n, x: ([n * x], ()), 3, jnp.float32(2))
  >>> [float(g) for g in pull([jnp.float32(1)])]
  [3.0]
  """
  inexact = [is_inexact(a) for a in args]

  def of_inexact(
    *moving: _types.Array,
  ) -> tuple[Sequence[_types.Array], _types.PyTree]:
    remaining = iter(moving)
    return fn(
      *(
        next(remaining) if moves else a
        for a, moves in zip(args, inexact, strict=True)
      )
    )

  moving = [a for a, moves in zip(args, inexact, strict=True) if moves]
  return jax.vjp(of_inexact, *moving, has_aux=True)
