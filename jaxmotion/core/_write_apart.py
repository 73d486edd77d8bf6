"""Values that XLA:CPU writes to memory before anything reads them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxmotion.core import _types


def write_apart(
  fn: Callable[..., _types.PyTree], *args: _types.PyTree
) -> _types.PyTree:
  """Returns `fn(*args)`, on CPU written to memory before anything reads it.

  XLA:CPU fuses a cheap expression into its readers and computes it in the shape
  of the reader. Where that shape makes it divide an index once an element, one
  pass more is faster. Optimization barriers are removed before fusion, so on
  CPU this is a call that may not be inlined. On other backends it is a plain
  call.

  Args:
    fn: function of arrays.
    *args: arguments of `fn`.

  Returns:
    What `fn` returns.

  Example:
    >>> import jax.numpy as jnp
    >>> write_apart(lambda x: 2 * x, jnp.ones(2))
    Array([2., 2.], dtype=float32)
  """

  def inline_inner(*args: _types.PyTree) -> _types.PyTree:
    # `jnp.where` is a call, too, and would otherwise be written apart as well.
    with set_xla_metadata(inlineable="true"):
      return fn(*args)

  def call(*args: _types.PyTree) -> _types.PyTree:
    # Also where `trace_in_place` leaves out all other calls.
    with set_xla_metadata(inlineable="false"), jax.disable_jit(False):
      return jax.jit(inline_inner)(*args)

  return lax.platform_dependent(*args, cpu=call, default=fn)


def pad_apart(x: _types.Array, count: int, fill: _types.Array) -> _types.Array:
  """Appends `count` rows of `fill` to an array, on CPU written to memory.

  XLA:CPU would ask in every loop that reads an element whether it is padding.
  Alone, a concatenation is two copies.

  Args:
    x: vector, or array whose rows are along its first axis.
    count: number of rows to append; elements of a vector.
    fill: scalar of the array's dtype.

  Returns:
    The longer array.

  Example:
    >>> import jax.numpy as jnp
    >>> pad_apart(jnp.ones(2), 1, jnp.float32(0)).tolist()
    [1.0, 1.0, 0.0]
  """
  return write_apart(
    lambda x, fill: jnp.concatenate(
      [x, jnp.broadcast_to(fill, (count, *x.shape[1:]))]
    ),
    x,
    fill,
  )
