"""Casts between floats that keep finite elements finite."""

from typing import Any

import jax.numpy as jnp

from jaxmotion.core import _types


def saturate_cast(x: _types.Array, dtype: Any) -> _types.Array:
  """Rounds to another float; finite elements saturate, others stay as they are.

  A plain cast turns finite elements beyond the greatest float of a narrower
  dtype into infinities.

  Args:
    x: floating array of any shape.
    dtype: floating dtype of the result.

  >>> saturate_cast(jnp.array([65536.0, -jnp.inf]), "float16").tolist()
  [65504.0, -inf]
  """
  most = float(jnp.finfo(dtype).max)
  if most >= float(jnp.finfo(x.dtype).max):
    return x.astype(dtype)
  # Wide first: bfloat16 does not hold the greatest float16.
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  # Not `clip` alone, which on a GPU may turn NaN into a number.
  clipped = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -most, most), wide)
  return clipped.astype(dtype)
