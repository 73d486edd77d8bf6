"""Acts on a gradient in the backward pass, before codecs see it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion.core import Array


class GradientGuard(NamedTuple):
  """Arrays that act on the gradient of one leaf.

  Attributes:
    share: float32[], factor of this worker's gradient in the mean, or None. A
      share of 0 drops the gradient, even if it is not finite.
    flag: float32[], a zero whose own gradient is NaN if that of the leaf is not
      finite, or None.

  Example:
    >>> guard = GradientGuard(share=jnp.float32(0.5), flag=None)
    >>> float(guard.share), guard.flag
    (0.5, None)
  """

  share: Array | None
  flag: Array | None


def guard_gradient(x: Array, guard: GradientGuard, nonfinite: str) -> Array:
  """Returns `x` with a gradient that is dropped, checked and scaled."""
  # nonfinite: "zero" replaces elements that are not finite by zero.
  bare = guard.share is None and guard.flag is None
  if bare and nonfinite != "zero":
    return x
  return _guard(nonfinite, x, guard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _guard(nonfinite: str, x: Array, guard: GradientGuard) -> Array:
  return x


def _forward(
  nonfinite: str, x: Array, guard: GradientGuard
) -> tuple[Array, GradientGuard]:
  return x, guard


def _backward(
  nonfinite: str, guard: GradientGuard, ct: Array
) -> tuple[Array, Any]:
  share = guard.share
  if share is not None:
    ct = jnp.where(share == 0, 0, ct)
  finite = jnp.isfinite(ct)
  flag = None
  if guard.flag is not None:
    flag = jnp.where(finite.all(), 0.0, jnp.nan).astype(guard.flag.dtype)
  if nonfinite == "zero":
    ct = jnp.where(finite, ct, 0)
  if share is not None:
    wide = jnp.promote_types(ct.dtype, share.dtype)
    ct = (ct.astype(wide) * share.astype(wide)).astype(ct.dtype)
    share = jnp.zeros_like(share)
  return ct, GradientGuard(share, flag)


_guard.defvjp(_forward, _backward)
