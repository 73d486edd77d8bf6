"""In-place updates of arrays that XLA:CPU would otherwise copy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import _types


def update_in_place(
  fn: Callable[[_types.PyTree, _types.PyTree], _types.PyTree],
  target: _types.PyTree,
  spent: _types.PyTree,
  count: _types.Array,
) -> _types.PyTree:
  """Returns `fn(target, spent)`, on CPU written to the memory of `target`.

  XLA:CPU fuses a cheap expression into each of its readers, however many there
  are, and optimization barriers are removed before. Each reader then needs
  `target`, so the result cannot overwrite it: a copy, and fresh pages, in every
  step. A loop is a computation of its own and updates its carry in place, so on
  CPU this is a loop of one iteration. On other backends it is a plain call.

  Args:
    fn: function of (target, spent), elementwise in `target` and cheap; it may
      close over other arrays.
    target: pytree of arrays; the result has the same shapes and dtypes.
    spent: pytree of small arrays that are not needed afterwards. The loop
      overwrites them with zeros; otherwise XLA would compute expressions of
      `spent` alone before the loop, and pass them through memory.
    count: int32[], at least 0, not known when the program is compiled. The
      loop has one iteration for any count, but the compiler cannot tell.

  Returns:
    The updated pytree.

  Example:
    >>> three = jnp.full((2,), 3.0)
    >>> update_in_place(lambda v, s: v * s, three, jnp.float32(2), jnp.int32(0))
    Array([6., 6.], dtype=float32)
  """

  def in_place(
    target: _types.PyTree, spent: _types.PyTree, count: _types.Array
  ) -> _types.PyTree:
    iterations = jnp.minimum(count, 0) + 1
    erased = jax.tree.map(jnp.zeros_like, spent)

    def run_once(
      carry: tuple[_types.Array, _types.PyTree, _types.PyTree],
    ) -> tuple[Any, ...]:
      left, value, spent = carry
      return left - 1, fn(value, spent), erased

    carry = (iterations, target, spent)
    return lax.while_loop(lambda c: c[0] > 0, run_once, carry)[1]

  def call_directly(
    target: _types.PyTree, spent: _types.PyTree, count: _types.Array
  ) -> _types.PyTree:
    return fn(target, spent)

  return lax.platform_dependent(
    target, spent, count, cpu=in_place, default=call_directly
  )
