"""Policies for gradients that are not finite, agreed on by all workers."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.collectives import _arguments
from jaxmotion.core import Array, AxisName, PyTree

NONFINITE_POLICIES = ("propagate", "skip", "zero")


def all_finite(tree: PyTree, axis_name: AxisName) -> Array:
  """Returns whether every element on every worker is finite.

  Args:
    tree: pytree of floating-point arrays, this worker's own.
    axis_name: the workers' axis.

  Returns:
    bool[], the same on all workers, who agree on it by one 4-byte sum.
  """
  core.check_arrays("tree", tree)
  _arguments.count_workers(axis_name)
  bad = [~jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
  count = sum((b.astype(jnp.int32) for b in bad), jnp.int32(0))
  return lax.psum(core.to_varying(count, axis_name), axis_name) == 0


def apply_nonfinite_policy(
  policy: str, x: PyTree, axis_name: AxisName
) -> tuple[PyTree, Array | None]:
  """Prepares gradients for a collective under a policy for non-finite elements.

  "propagate" leaves the elements alone: they reach every worker, and each codec
  says how they decode. "zero" replaces non-finite elements by zero. "skip"
  leaves them alone too, but if any worker has one, `keep_update` then discards
  the exchange on all workers.

  Args:
    policy: one of `NONFINITE_POLICIES`.
    x: pytree of floating-point arrays, this worker's own.
    axis_name: the workers' axis.

  Returns:
    The tree to reduce, and bool[]: whether to keep the result of the collective
    (give it to `keep_update`). None means always.
  """
  _arguments.count_workers(axis_name)
  core.check_arrays("x", x)
  core.check_choice("policy", policy, NONFINITE_POLICIES)
  if policy == "zero":
    x = zero_nonfinite(x)
  return x, all_finite(x, axis_name) if policy == "skip" else None


def zero_nonfinite(x: PyTree) -> PyTree:
  """Replaces elements that are not finite by zeros.

  Args:
    x: pytree of floating-point arrays.
  """
  return jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), x)


def keep_update(
  ok: Array | None, updates: PyTree, state: PyTree, old_state: PyTree
) -> tuple[PyTree, PyTree]:
  """Returns updates and state, or zeros and the old state if not `ok`.

  Args:
    ok: bool[], the same on all workers; None keeps the update.
    updates: pytree of arrays.
    state: state after the update.
    old_state: state before the update, which is kept bit for bit.
  """
  core.check_arrays("updates", updates)
  core.check_arrays("state", state)
  if ok is None:
    return updates, state
  _arguments.check_shaped("ok", ok)
  core.check_like("old_state", old_state, state, "`state`")
  updates = jax.tree.map(lambda a: jnp.where(ok, a, jnp.zeros_like(a)), updates)
  state = jax.tree.map(lambda a, b: jnp.where(ok, a, b), state, old_state)
  return updates, state
