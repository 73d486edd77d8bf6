"""Gradients of compressed collectives: those of the uncompressed ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.collectives._weight import apply_weight
from jaxmotion.core import Array, AxisName, PyTree


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
    weighted = apply_weight(x, weight, axis_name, op)
    weighted = jax.tree.map(lambda w, a: w.astype(a.dtype), weighted, x)
    return collective(weighted, axis_name)

  return reduce
