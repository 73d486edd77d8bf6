"""Scheduling order between computations that do not depend on one another."""

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import _bits, _compat, _types


def schedule_after(x: _types.Array, token: _types.Array) -> _types.Array:
  """Returns `x`; on CPU, its readers wait until `token` is computed.

  XLA:CPU combines all independent sums into one, which then starts when the
  last operand is computed. It removes optimization barriers before it does so,
  so they do not prevent that. The order is therefore made a data dependency.
  On other backends `x` is returned as it is: they have schedulers of their own.

  Args:
    x: array of any integer or floating dtype.
    token: array of any integer or floating dtype.

  Returns:
    `x`; to its first element a zero is added that is computed from `token`.
    Without an element there is nothing to wait with, or for.

  Example:
    >>> schedule_after(jnp.arange(3), jnp.ones(2)).tolist()
    [0, 1, 2]
  """

  if not x.size or not token.size:
    return x

  def add_dependency(x: _types.Array, token: _types.Array) -> _types.Array:
    word = _bits.to_bits(token.reshape(-1)[0]).astype(jnp.uint32)
    # This is zero for any token, because half of an unsigned number is not
    # negative as a signed one. The compiler cannot tell.
    zero = jnp.minimum((word >> 1).astype(jnp.int32), 0)
    zero = _compat.assert_replicated(
      zero, tuple(sorted(_compat.varying_axes(zero), key=str))
    )
    corner = (0,) * x.ndim
    # The zero is added to the bits: a sum of floats would lose the sign of -0.
    bits = _bits.to_bits(lax.slice(x, corner, (1,) * x.ndim))
    value = _bits.from_bits(bits + zero.astype(bits.dtype), x.dtype)
    return lax.dynamic_update_slice(x, value, corner)

  return lax.platform_dependent(
    x, token, cpu=add_dependency, default=lambda x, token: x
  )
