"""Casts to narrow floats and truncation to leading bytes, as `jax.numpy`.

There are no kernels, since XLA makes one pass of each function. On an H200,
kernels were equally fast, or at most 1.4 times as fast.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _checks, _error_memory, microscaling
from jaxmotion.kernels.microscaling import _op

_SIGN = 0x80000000
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_QUIET = 0x00400000
_HALF_NAN = 0x7E00
_FORMAT = core.choice(("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"))
_PLANES = core.sequence("1 to 4 uint8 arrays")
# Codes of infinity, of the NaN that casts return, and of the least NaN.
# float8_e4m3fn has no infinity.
_SPECIAL = {
  "float8_e4m3fn": (0x7F, 0x7F, 0x7F),
  "float8_e5m2": (0x7C, 0x7E, 0x7D),
}


@core.declare(x=core.float_array, dtype=_FORMAT)
def cast_encode(x: Array, dtype: str) -> Array:
  """Rounds to a narrower float and returns words of its bits.

  bits(round_to_nearest_even(clip(x, -M, M))), M the greatest finite value.
  Infinity is not clipped, but is NaN in float8_e4m3fn. Every device
  returns the same words, with two exceptions. NaN in 16 bits is 0x7fff on a
  GPU, where the conversion keeps neither sign nor payload. Values below 2^-126
  as bfloat16 are zeros on XLA:CPU.

  Args:
    x: floating array of any shape.
    dtype: "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2".

  Returns:
    uint16 or uint8 of the shape of `x`.

  Example:
    >>> import jax.numpy as jnp
    >>> cast_encode(jnp.array([1.0, 500.0]), "float8_e4m3fn").tolist()
    [56, 126]
  """
  if jnp.dtype(dtype).itemsize == 1:
    return _encode_float8(x, dtype)
  y = core.saturate_cast(x.astype(jnp.float32), dtype)
  return lax.bitcast_convert_type(y, jnp.uint16)


@core.declare(like=core.float_array, dtype=_FORMAT)
def cast_decode(words: Array, like: ShapedLike, dtype: str) -> Array:
  """Returns the floats whose bits the words of `cast_encode` are, exactly.

  Args:
    words: uint16 or uint8.
    like: shape and dtype of the result.
    dtype: format of the words.
  """
  _check_cast(words, like, dtype)
  return _decode_words(words, like, dtype)


@core.declare(like=core.float_array, dtype=_FORMAT)
def cast_sum(words: Array, like: ShapedLike, dtype: str) -> Array:
  """Decodes the words of several workers and adds them, in one pass.

  Args:
    words: uint16 or uint8 [workers, ...].
    like: shape and dtype of the array that each worker encoded.
    dtype: format of the words.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.
  """
  _check_cast(words, like, dtype, "workers")
  decode = functools.partial(_decode_words, dtype=dtype)
  return _error_memory.sum_decoded(decode, words, like)


@core.declare(
  x=core.float_array,
  bytes=core.integer(1, 4),
  rounding=core.choice(("zero", "nearest")),
)
def truncate_encode(
  x: Array, bytes: int, rounding: str = "zero"
) -> tuple[Array, ...]:
  """Keeps the most significant bytes of each float32 word.

  From 2 bytes on a NaN keeps a bit of its mantissa, and no finite value rounds
  to infinity. With one byte magnitudes end at 2^127, which also stands for
  infinity and NaN. Every device returns the same bytes, except for
  those of a float16 NaN, whose payload a GPU does not keep.

  Args:
    x: floating array of any shape.
    bytes: number of bytes kept, 1 to 4.
    rounding: "zero" (truncation) or "nearest" (ties to even).

  Returns:
    A uint8 array of the shape of `x` for each byte, most significant first.

  Example:
    >>> import jax.numpy as jnp
    >>> [p.tolist() for p in truncate_encode(jnp.array([1.0, -2.0]), 2)]
    [[63, 192], [128, 0]]
  """
  u = _round_to_bytes(_word_of(x), bytes, rounding)
  return tuple((u >> (24 - 8 * i)).astype(jnp.uint8) for i in range(bytes))


@core.declare(planes=_PLANES, like=core.float_array)
def truncate_decode(planes: tuple[Array, ...], like: ShapedLike) -> Array:
  """Returns float32 words whose leading bytes are the planes, the rest zeros.

  Args:
    planes: uint8 arrays, most significant byte first.
    like: shape and dtype of the result.
  """
  _check_planes(planes, like)
  return _join_planes(planes, like)


@core.declare(planes=_PLANES, like=core.float_array)
def truncate_sum(planes: tuple[Array, ...], like: ShapedLike) -> Array:
  """Decodes the planes of several workers and adds them, in one pass.

  Args:
    planes: uint8 [workers, ...] arrays, most significant byte first.
    like: shape and dtype of the array that each worker encoded.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.
  """
  _check_planes(planes, like, "workers")
  return _error_memory.sum_decoded(_join_planes, planes, like)


def _decode_words(words: Array, like: ShapedLike, dtype: str) -> Array:
  """Returns the floats whose bits the words are, in the dtype of `like`."""
  if jnp.dtype(dtype).itemsize == 1:
    y = _decode_float8(words, dtype)
  else:
    y = lax.bitcast_convert_type(words, jnp.dtype(dtype))
  return core.saturate_cast(y.reshape(like.shape), like.dtype)


def _encode_float8(x: Array, dtype: str) -> Array:
  """Rounds to nearest even, saturating: uint8 of the shape of `x`."""
  # In integers, not by the backends' conversions, for three reasons. XLA:CPU
  # makes slow code of them (encode 3x, decode 1.6x). Those of NVIDIA GPUs turn
  # infinities into the greatest finite value. GPUs before Ada have none.
  form, (infinity, nan, _) = microscaling.FORMATS[dtype], _SPECIAL[dtype]
  bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
  magnitude = bits & jnp.uint32(_MAGNITUDE)
  v = lax.bitcast_convert_type(magnitude, jnp.float32)
  codes = jnp.minimum(_op.round_codes(v, form), jnp.uint32(form.most))
  codes = jnp.where(magnitude < _INFINITY, codes, jnp.uint32(infinity))
  codes = jnp.where(magnitude > _INFINITY, jnp.uint32(nan), codes)
  return (codes | ((bits >> 24) & jnp.uint32(0x80))).astype(jnp.uint8)


def _decode_float8(words: Array, dtype: str) -> Array:
  """Returns the float32 values whose codes the words are."""
  form, (_, _, nan) = microscaling.FORMATS[dtype], _SPECIAL[dtype]
  wide = words.astype(jnp.uint16)
  magnitude = wide & jnp.uint16(0x7F)
  # A float16 with the same mantissa bits. It has at least as many exponents, so
  # it is the value up to a power of two, also below the least normal.
  half = magnitude << (10 - form.mantissa)
  half = jnp.where(magnitude < nan, half, jnp.uint16(_HALF_NAN))
  half = half | ((wide & jnp.uint16(0x80)) << 8)
  y = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
  return y * 2.0 ** (15 - form.bias)


def _word_of(x: Array) -> Array:
  """Returns the bits of the elements as float32, uint32."""
  if x.dtype == jnp.bfloat16:
    # Not by a conversion, in which hosts flush subnormal numbers to zero.
    return core.to_bits(x).astype(jnp.uint32) << 16
  return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _round_to_bytes(u: Array, bytes: int, rounding: str) -> Array:
  """Rounds words to their leading bytes; the other bytes are arbitrary."""
  if bytes == 4:
    return u
  nan = (u & _MAGNITUDE) > _INFINITY
  low = 32 - 8 * bytes
  if rounding == "nearest":
    magnitude = u & _MAGNITUDE
    even = (magnitude >> low) & 1
    rounded = magnitude + jnp.uint32(2 ** (low - 1) - 1) + even
    # With one byte, rounding up past the last exponent would reach the sign.
    rounded = jnp.minimum(rounded, jnp.uint32(_MAGNITUDE))
    if bytes > 1:
      most = jnp.minimum(rounded, jnp.uint32(_INFINITY - 2**low))
      rounded = jnp.where(magnitude < _INFINITY, most, rounded)
    u = jnp.where(nan, u, (u & jnp.uint32(_SIGN)) | rounded)
  return jnp.where(nan, u | _QUIET, u) if bytes > 1 else u


def _join_planes(planes: tuple[Array, ...], like: ShapedLike) -> Array:
  """Returns float32 words whose leading bytes are the planes."""
  u = jnp.zeros((), jnp.uint32)
  for i, plane in enumerate(planes):
    u = u | (plane.astype(jnp.uint32) << (24 - 8 * i))
  u = u.reshape(like.shape)
  if like.dtype == jnp.bfloat16:
    # The low bytes are zero, as they were in what was encoded.
    return core.from_bits((u >> 16).astype(jnp.uint16), like.dtype)
  y = lax.bitcast_convert_type(u, jnp.float32)
  if len(planes) == 1 and float(jnp.finfo(like.dtype).max) < 2.0**127:
    # The last level stands for infinity and NaN: it must not saturate.
    y = jnp.where(jnp.abs(y) < 2.0**127, y, 2 * y)
  return core.saturate_cast(y, like.dtype)


def _check_cast(words: Any, like: ShapedLike, dtype: str, *lead: str) -> None:
  bits = jnp.dtype(dtype).itemsize * 8
  _checks.check_words("words", words, (*lead, *like.shape), bits)


def _check_planes(
  planes: tuple[Array, ...], like: ShapedLike, *lead: str
) -> None:
  """Raises unless `planes` are one to four uint8 arrays like `like`."""
  if not 1 <= len(planes) <= 4:
    raise ValueError(
      f"`planes` must be 1 to 4 uint8 arrays, got {len(planes)} of them."
    )
  workers: tuple[int | str, ...] = lead
  for i, plane in enumerate(planes):
    _checks.check_words(f"planes[{i}]", plane, (*workers, *like.shape), 8)
    workers = tuple(plane.shape[: len(lead)])
