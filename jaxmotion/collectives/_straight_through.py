"""Gradients of compressed collectives: those of the uncompressed ones."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, AxisName, PyTree, axis_size, to_varying


def straight_through(
  reference_op: Callable[[PyTree], PyTree], x: PyTree, y: PyTree
) -> PyTree:
  """Returns `y` with the gradient that `reference_op(x)` would have.

  Args:
    reference_op: the uncompressed collective, a linear function.
    x: argument of `reference_op`.
    y: compressed result, computed from `stop_gradient(x)`.
  """
  transpose = jax.linear_transpose(reference_op, x)

  @jax.custom_vjp
  def through(x: PyTree, y: PyTree) -> PyTree:
    del x
    return y

  def forward(x: PyTree, y: PyTree) -> tuple[PyTree, None]:
    del x
    return y, None

  def backward(_: None, ct: PyTree) -> tuple[PyTree, PyTree]:
    (x_ct,) = transpose(ct)
    return x_ct, jax.tree.map(jnp.zeros_like, ct)

  through.defvjp(forward, backward)
  return through(x, y)


def reference_reduce(
  axis_name: AxisName, op: str, weight: Array | float | None
) -> Callable[[PyTree], PyTree]:
  """Returns the uncompressed all-reduce: `lax.pmean` or `psum`, weighted.

  Args:
    axis_name: the workers' axis.
    op: "mean" or "sum".
    weight: this worker's weight, or None.
  """
  collective = lax.pmean if op == "mean" else lax.psum

  def reduce(x: PyTree) -> PyTree:
    return collective(apply_weight(x, weight, axis_name, op), axis_name)

  return reduce


def apply_weight(
  x: PyTree, weight: Any, axis_name: AxisName, op: str
) -> PyTree:
  """Returns `x` times this worker's share of the mean, or weight in the sum.

  Args:
    x: pytree of arrays, this worker's own.
    weight: this worker's weight, a scalar; None leaves `x` as it is.
    axis_name: the workers' axis.
    op: "mean" or "sum", the reduction that follows.

  Raises:
    ValueError: the weight is not a scalar.
  """
  if weight is None:
    return x
  if jnp.ndim(weight) != 0:
    raise ValueError(
      f"`weight` must be a scalar, got an array of shape {jnp.shape(weight)}."
    )
  w = to_varying(jnp.asarray(weight, jnp.float32), axis_name)
  if op == "mean":
    total = lax.psum(w, axis_name)
    # The mean that follows divides by the number of workers.
    w = jnp.where(total > 0, w * axis_size(axis_name) / total, 0.0)
  return jax.tree.map(lambda a: a * w.astype(a.dtype), x)
