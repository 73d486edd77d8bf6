"""Narrower floats, and the leading bytes of floats, value by value.

Every function but the sums works on arrays of any shape, a tile of a kernel
included.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels._error_memory import sum_decoded
from jaxmotion.kernels.narrow import _float8

_SIGN = 0x80000000
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_QUIET = 0x00400000


def cast_encode(x: Array, *, dtype: str) -> Array:
  """See `_api`."""
  if jnp.dtype(dtype).itemsize == 1:
    return _float8.encode(x, dtype)
  most = float(jnp.finfo(dtype).max)
  y = x.astype(jnp.float32)
  # Not `clip` alone, which on a GPU may make a number of NaN.
  y = jnp.where(jnp.isfinite(y), jnp.clip(y, -most, most), y)
  return lax.bitcast_convert_type(y.astype(dtype), jnp.uint16)


def cast_decode(words: Array, like: ShapedLike, *, dtype: str) -> Array:
  """See `_api`."""
  if jnp.dtype(dtype).itemsize == 1:
    y = _float8.decode(words, dtype)
  else:
    y = lax.bitcast_convert_type(words, jnp.dtype(dtype))
  return y.reshape(like.shape).astype(like.dtype)


def cast_sum(words: Array, *, like: ShapedLike, dtype: str) -> Array:
  """See `_api`."""
  decode = functools.partial(cast_decode, dtype=dtype)
  return sum_decoded(decode, words, like)


def truncate_encode(
  x: Array, *, bytes: int, rounding: str
) -> tuple[Array, ...]:
  """See `_api`."""
  u = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  u = _shorten(u, bytes, rounding)
  return tuple((u >> (24 - 8 * i)).astype(jnp.uint8) for i in range(bytes))


def _shorten(u: Array, bytes: int, rounding: str) -> Array:
  """Words whose leading bytes are what is kept; the others are arbitrary."""
  if bytes == 4:
    return u
  nan = (u & _MAGNITUDE) > _INFINITY
  low = 32 - 8 * bytes
  if rounding == "nearest":
    magnitude = u & _MAGNITUDE
    even = (magnitude >> low) & 1
    rounded = magnitude + jnp.uint32(2 ** (low - 1) - 1) + even
    # One byte: rounding up past the last exponent would reach the sign.
    rounded = jnp.minimum(rounded, jnp.uint32(_MAGNITUDE))
    if bytes > 1:
      most = jnp.minimum(rounded, jnp.uint32(_INFINITY - 2**low))
      rounded = jnp.where(magnitude < _INFINITY, most, rounded)
    u = jnp.where(nan, u, (u & jnp.uint32(_SIGN)) | rounded)
  return jnp.where(nan, u | _QUIET, u) if bytes > 1 else u


def truncate_decode(planes: tuple[Array, ...], like: ShapedLike) -> Array:
  """See `_api`."""
  u = jnp.zeros((), jnp.uint32)
  for i, plane in enumerate(planes):
    u = u | (plane.astype(jnp.uint32) << (24 - 8 * i))
  y = lax.bitcast_convert_type(u, jnp.float32)
  return y.reshape(like.shape).astype(like.dtype)


def truncate_sum(planes: tuple[Array, ...], *, like: ShapedLike) -> Array:
  """See `_api`."""
  return sum_decoded(truncate_decode, planes, like)
