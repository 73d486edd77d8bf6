"""Weights of workers in a mean or a sum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, AxisName, PyTree


def check_weight(weight: Any) -> None:
  """Raises unless a worker's weight is a real scalar, finite if it is known.

  The value of a traced weight is not known. Where it is not finite, it makes
  the result not finite on all workers.

  Args:
    weight: what the caller gave; None will do.

  Raises:
    TypeError: not a number.
    ValueError: not a scalar, or NaN or infinite.

  >>> check_weight(float("nan"))
  Traceback (most recent call last):
  ...
  ValueError: `weight` must be finite, got nan.
  """
  if weight is None:
    return
  traced = isinstance(weight, jax.core.Tracer)
  try:
    value = weight if traced else np.asarray(weight)
  except ValueError as error:  # A list of lists of unequal lengths.
    raise TypeError(f"`weight` must be a scalar, got {weight!r}.") from error
  kinds = (jnp.floating, jnp.integer)
  if not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
    raise TypeError(f"`weight` must be a real number, got {weight!r}.")
  if value.ndim:
    raise ValueError(
      f"`weight` must be a scalar, got an array {core.shape_string(value)}."
    )
  if not traced and not np.isfinite(np.float64(value)):
    raise ValueError(f"`weight` must be finite, got {weight!r}.")


def apply_weight(
  x: PyTree, weight: Any, axis_name: AxisName, op: str
) -> PyTree:
  """Returns `x` times this worker's share of the mean, or weight in the sum.

  Args:
    x: pytree of arrays, this worker's own.
    weight: this worker's weight, a scalar; None leaves `x` as it is.
    axis_name: the workers' axis.
    op: "mean" or "sum", the reduction that follows.

  Returns:
    The tree, its arrays in float32 at least. Shares that were rounded to a
    narrow dtype would no longer add up to 1.

  Raises:
    TypeError, ValueError: as `check_weight`.
  """
  if weight is None:
    return x
  check_weight(weight)
  w = core.to_varying(jnp.asarray(weight, jnp.float32), axis_name)
  if op == "mean":
    # The mean of the weights, and not their sum, which may overflow.
    mean = lax.psum(w / core.axis_size(axis_name), axis_name)
    # The mean that follows divides by the number of workers. A weight of zero
    # is no share even of a mean of zero; any other weight then makes the
    # result infinite or NaN, as the formula does.
    w = jnp.where(w == 0, 0.0, w / mean)

  def scale_leaf(a: Array) -> Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return a.astype(wide) * w.astype(wide)

  return jax.tree.map(scale_leaf, x)
