"""Updating arrays in place, where the compiler would not by itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core._types import Array, PyTree


def update_in_place(
  fn: Callable[[PyTree, PyTree], PyTree],
  target: PyTree,
  spent: PyTree,
  count: Array,
) -> PyTree:
  """Returns `fn(target, spent)`, on a host written where `target` was.

  XLA:CPU fuses a cheap expression into everything that reads it, however
  often that is, and barriers do not outlive its optimiser. What it then
  computes several times needs `target` several times, so the new value cannot
  take its place: a copy, and fresh pages, in every step. A loop is a
  computation of its own and updates what it carries in place. Elsewhere this
  is a plain call.

  Args:
    fn: elementwise in `target`, cheap; may close over other arrays.
    target: pytree of arrays, of whose shapes and dtypes the result is too.
    spent: pytree of small arrays that are not needed any more: the loop
      erases them, or what is made of them alone would be made before the loop
      and so pass through memory.
    count: int32[], at least 0, not known when the program is compiled; the
      loop has one turn whatever it is, but the compiler cannot tell.

  Returns:
    The new value.

  Example:
    >>> three = jnp.full((2,), 3.0)
    >>> update_in_place(lambda v, s: v * s, three, jnp.float32(2), jnp.int32(0))
    Array([6., 6.], dtype=float32)
  """

  def in_place(target: PyTree, spent: PyTree, count: Array) -> PyTree:
    turns = jnp.minimum(count, 0) + 1
    erased = jax.tree.map(jnp.zeros_like, spent)

    def body(carry: tuple[Array, PyTree, PyTree]) -> tuple:
      left, value, spent = carry
      return left - 1, fn(value, spent), erased

    carry = (turns, target, spent)
    return lax.while_loop(lambda c: c[0] > 0, body, carry)[1]

  def plain(target: PyTree, spent: PyTree, count: Array) -> PyTree:
    return fn(target, spent)

  return lax.platform_dependent(
    target, spent, count, cpu=in_place, default=plain
  )
