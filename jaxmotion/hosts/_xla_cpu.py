"""Values that XLA:CPU writes to memory, updates in place, or orders.

XLA:CPU removes optimization barriers before it fuses and joins operations. So
calls, loops and data dependencies say what barriers say to other backends.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxmotion import core
from jaxmotion.core import Array, PyTree

RUN_ONCE = "run_once"
"""Name of the body of a loop that has one trip, for any arguments."""


def choose_by_platform(
  *args: PyTree,
  cpu: Callable[..., PyTree],
  default: Callable[..., PyTree],
) -> PyTree:
  """Runs one function on CPU, and another one on other platforms."""
  # Both are traced only where the program may run on either. A function that
  # encodes takes 10 ms to trace.
  platforms = core.list_platforms()
  if "cpu" not in platforms:
    return default(*args)
  if len(platforms) == 1:
    return cpu(*args)
  return lax.platform_dependent(*args, cpu=cpu, default=default)


def write_apart(fn: Callable[..., PyTree], *args: PyTree) -> PyTree:
  """Returns `fn(*args)`, on CPU written to memory before anything reads it."""
  # XLA:CPU fuses a cheap expression into its readers and computes it in the
  # shape of the reader. Where that shape makes it divide an index once an
  # element, one pass more is faster. Optimization barriers are removed before
  # fusion, so on CPU this is a call that may not be inlined. On other backends
  # it is a plain call.

  def inline_inner(*args: PyTree) -> PyTree:
    # `jnp.where` is a call, too, and would otherwise be written apart as well.
    with set_xla_metadata(inlineable="true"):
      return fn(*args)

  def call(*args: PyTree) -> PyTree:
    # Also where `trace_in_place` leaves out all other calls.
    with set_xla_metadata(inlineable="false"), jax.disable_jit(False):
      return jax.jit(inline_inner)(*args)

  return choose_by_platform(*args, cpu=call, default=fn)


def pad_apart(x: Array, count: int, fill: Array) -> Array:
  """Appends `count` rows of `fill` to an array, on CPU written to memory.

  >>> pad_apart(jnp.ones(2), 1, jnp.float32(0)).tolist()
  [1.0, 1.0, 0.0]
  """
  # XLA:CPU would ask in every loop that reads an element whether it is padding.
  # Alone, a concatenation is two copies.
  # x: vector, or array whose rows are along its first axis. fill: scalar of the
  # dtype of `x`.
  return write_apart(
    lambda x, fill: jnp.concatenate(
      [x, jnp.broadcast_to(fill, (count, *x.shape[1:]))]
    ),
    x,
    fill,
  )


def update_in_place(
  fn: Callable[[PyTree, PyTree], PyTree],
  target: PyTree,
  spent: PyTree,
  count: Array,
) -> PyTree:
  """Returns `fn(target, spent)`, on CPU written to the memory of `target`."""
  # XLA:CPU fuses a cheap expression into each of its readers, however many
  # there are, and optimization barriers are removed before. Each reader then
  # needs `target`, so the result cannot overwrite it: a copy, and fresh pages,
  # in every step.
  # A loop is a computation of its own and updates its carry in place, so on CPU
  # this is a loop of one iteration. On other backends it is a plain call.
  # fn: elementwise in `target` and cheap; it may close over other arrays.
  # spent: small arrays that are not needed afterwards.
  # count: int32[], at least 0, not known when the program is compiled.

  def in_place(target: PyTree, spent: PyTree, count: Array) -> PyTree:
    """Runs `fn` as the body of a loop, whose carry is updated in place."""
    # The loop has one iteration for any count, but the compiler cannot tell.
    iterations = jnp.minimum(count, 0) + 1
    # The loop overwrites `spent` with zeros. Otherwise XLA would compute
    # expressions of `spent` alone before the loop, and pass them through
    # memory.
    erased = jax.tree.map(jnp.zeros_like, spent)

    def run_once(carry: tuple[Array, PyTree, PyTree]) -> tuple[Any, ...]:
      left, value, spent = carry
      return left - 1, fn(value, spent), erased

    carry = (iterations, target, spent)
    return lax.while_loop(lambda c: c[0] > 0, run_once, carry)[1]

  call_directly = lambda target, spent, count: fn(target, spent)
  args = target, spent, count
  return choose_by_platform(*args, cpu=in_place, default=call_directly)


def schedule_after(x: Array, token: Array) -> Array:
  """Returns `x`; on CPU, its readers wait until `token` is computed."""
  # XLA:CPU combines all independent sums into one, which then starts when the
  # last operand is computed. It removes optimization barriers before it does
  # so, so they do not prevent that. The order is therefore made a data
  # dependency. On other backends `x` is returned as it is: they have schedulers
  # of their own.
  # x, token: of any integer or floating dtype.
  if not x.size or not token.size:
    # Without an element there is nothing to wait with, or for.
    return x

  def add_dependency(x: Array, token: Array) -> Array:
    """Adds a zero that is computed from the token to the first element."""
    word = core.to_bits(token.reshape(-1)[0]).astype(jnp.uint32)
    # This is zero for any token, because half of an unsigned number is not
    # negative as a signed one. The compiler cannot tell.
    zero = jnp.minimum((word >> 1).astype(jnp.int32), 0)
    zero = core.assert_replicated(
      zero, tuple(sorted(core.varying_axes(zero), key=str))
    )
    corner = (0,) * x.ndim
    # The zero is added to the bits: a sum of floats would lose the sign of -0.
    bits = core.to_bits(lax.slice(x, corner, (1,) * x.ndim))
    value = core.from_bits(bits + zero.astype(bits.dtype), x.dtype)
    return lax.dynamic_update_slice(x, value, corner)

  return choose_by_platform(
    x, token, cpu=add_dependency, default=lambda x, token: x
  )
