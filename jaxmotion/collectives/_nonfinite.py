"""What happens when a worker's values are not finite."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, AxisName, PyTree, check_choice, to_varying

NONFINITE_POLICIES = ("propagate", "skip", "zero")


def all_finite(tree: PyTree, axis_name: AxisName) -> Array:
  """Says whether every value on every worker is finite.

  Args:
    tree: pytree of floating-point arrays, this worker's own.
    axis_name: the workers' axis.

  Returns:
    bool[], the same on all workers: one 4-byte sum agrees on it.
  """
  bad = [~jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
  count = sum((b.astype(jnp.int32) for b in bad), jnp.int32(0))
  return lax.psum(to_varying(count, axis_name), axis_name) == 0


def apply_nonfinite_policy(
  policy: str,
  axis_name: AxisName,
  reduce: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
  x: PyTree,
  state: PyTree,
) -> tuple[PyTree, PyTree, Array]:
  """Runs a collective under a policy for non-finite values.

  Args:
    policy: "propagate" leaves values alone: they reach every worker, and each
      codec says how they decode. "zero" replaces them by zero before the
      codec. "skip": if any worker has one, all workers get zeros and keep
      their state as it was, bit for bit.
    axis_name: the workers' axis.
    reduce: maps (x, state) to (reduced, new state).
    x: this worker's values.
    state: this worker's state.

  Returns:
    The reduced tree, the state, and bool[]: whether it took place.
  """
  check_choice("nonfinite", policy, NONFINITE_POLICIES)
  if policy == "zero":
    x = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), x)
  if policy != "skip":
    y, state = reduce(x, state)
    return y, state, jnp.array(True)
  ok = all_finite(x, axis_name)
  y, new_state = reduce(x, state)
  y = jax.tree.map(lambda a: jnp.where(ok, a, jnp.zeros_like(a)), y)
  state = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new_state, state)
  return y, state, ok
