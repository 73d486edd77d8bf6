"""Gradients of compressed collectives: those of the uncompressed ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.collectives import _arguments
from jaxmotion.core import Array, AxisName, PyTree


def straight_through(
  reference_op: Callable[[PyTree], PyTree], x: PyTree, y: PyTree
) -> PyTree:
  """Returns `y` with the gradient that `reference_op(x)` would have."""
  types = jax.tree.map(jax.typeof, x)

  # Transposed only when it is needed: a transpose made here would hold tracers
  # of this call, which `jax.checking_leaks` reports.
  def pull_back(ct: PyTree, key: core.Key | None) -> PyTree:
    del key
    (x_ct,) = jax.linear_transpose(reference_op, types)(ct)
    return x_ct

  return with_gradient(pull_back, x, y, None)


def with_gradient(
  pull_back: Callable[[PyTree, core.Key | None], PyTree],
  x: PyTree,
  y: PyTree,
  key: core.Key | None,
) -> PyTree:
  """Returns `y` with the gradient that `pull_back` makes of its own."""

  @jax.custom_vjp
  def through(x: PyTree, y: PyTree, key: core.Key | None) -> PyTree:
    del x, key
    return y

  def forward(
    x: PyTree, y: PyTree, key: core.Key | None
  ) -> tuple[PyTree, core.Key | None]:
    del x
    return y, key

  def backward(
    key: core.Key | None, ct: PyTree
  ) -> tuple[PyTree, PyTree, core.Key | None]:
    zeros = jax.custom_derivatives.zero_from_primal(key)
    return pull_back(ct, key), jax.tree.map(jnp.zeros_like, ct), zeros

  through.defvjp(forward, backward)
  return through(x, y, key)


def reference_reduce(
  axis_name: AxisName, op: str, weight: Array | float | None
) -> Callable[[PyTree], PyTree]:
  """Returns the uncompressed all-reduce: `lax.pmean` or `psum`, weighted."""
  collective = lax.pmean if op == "mean" else lax.psum

  def reduce(x: PyTree) -> PyTree:
    weighted = _arguments.apply_weight(x, weight, axis_name, op)
    weighted = jax.tree.map(lambda w, a: w.astype(a.dtype), weighted, x)
    return collective(weighted, axis_name)

  return reduce
