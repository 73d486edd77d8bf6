"""An order between computations that do not need one another."""

import jax.numpy as jnp
from jax import lax

from jaxmotion.core._bits import from_bits, to_bits
from jaxmotion.core._compat import assert_replicated, varying_axes
from jaxmotion.core._types import Array


def schedule_after(x: Array, token: Array) -> Array:
  """Returns `x`; on a host, nothing that reads it starts before `token` is.

  XLA:CPU joins all independent sums into one, which then starts when the last
  operand is there, and forgets barriers before it does so. Elsewhere `x` is
  returned as it is: other backends have schedulers of their own.

  Args:
    x: array of at least one value, of any integer or floating dtype.
    token: likewise.

  Returns:
    `x`, whose first value has had a zero added that is made of `token`.

  Example:
    >>> schedule_after(jnp.arange(3), jnp.ones(2)).tolist()
    [0, 1, 2]
  """

  def ordered(x: Array, token: Array) -> Array:
    word = to_bits(token.reshape(-1)[0]).astype(jnp.uint32)
    # Zero, whatever the token: half of an unsigned number is not negative as
    # a signed one. The compiler does not know.
    zero = jnp.minimum((word >> 1).astype(jnp.int32), 0)
    zero = assert_replicated(zero, tuple(sorted(varying_axes(zero), key=str)))
    corner = (0,) * x.ndim
    # On the bits, for a sum of floats would lose the sign of a zero.
    bits = to_bits(lax.slice(x, corner, (1,) * x.ndim))
    value = from_bits(bits + zero.astype(bits.dtype), x.dtype)
    return lax.dynamic_update_slice(x, value, corner)

  return lax.platform_dependent(
    x, token, cpu=ordered, default=lambda x, token: x
  )
