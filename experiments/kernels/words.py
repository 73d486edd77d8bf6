"""Ops that turn single elements into words: casts, truncation, bit fields."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.kernels import arrays, ops
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import narrow, pack

# XLA:CPU flushes smaller bfloat16 numbers to zero.
_LEAST_NORMAL = 2.0**-126


def list_ops() -> list[ops.Op]:
  """Returns the ops of casts, truncations and bit fields."""
  return [
    *_cast_ops("bfloat16"),
    *_cast_ops("float8_e4m3fn"),
    *_cast_ops("float8_e5m2"),
    *_truncate_ops(1),
    *_truncate_ops(2),
    *_truncate_ops(3),
    *_truncate_ops(2, "nearest"),
    *(op for bits in (1, 2, 3, 4, 6) for op in _pack_ops(bits)),
  ]


def _cast_ops(dtype: str) -> list[ops.Op]:
  """Returns casts to a narrow dtype, and sums of their words."""

  encode = lambda x: narrow.cast_encode(x, dtype)

  def view_values(like: ShapedLike, args: tuple, words: Array) -> Array:
    # NaN has several words, and subnormal numbers may have that of zero.
    wide = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    values = narrow.cast_decode(words, wide, dtype)
    return jnp.where(jnp.abs(values) < _LEAST_NORMAL, 0.0, values)

  return _reference_ops(
    dtype,
    encode,
    lambda like, words: narrow.cast_sum(words, like, dtype),
    view_values,
  )


def _truncate_ops(count: int, rounding: str = "zero") -> list[ops.Op]:
  """Returns truncation to leading bytes, and sums of such planes."""

  def view_values(like: ShapedLike, args: tuple, planes: PyTree) -> Array:
    # A GPU does not keep the payload of a float16 NaN.
    return narrow.truncate_decode(planes, like)

  return _reference_ops(
    f"truncate{count}" + ("" if rounding == "zero" else f"_{rounding}"),
    lambda x: narrow.truncate_encode(x, count, rounding),
    lambda like, planes: narrow.truncate_sum(planes, like),
    view_values,
  )


def _reference_ops(
  name: str,
  encode: Callable[[Array], PyTree],
  add: Callable[[ShapedLike, PyTree], Array],
  view: Callable[[ShapedLike, tuple, PyTree], Array],
) -> list[ops.Op]:
  """Returns the ops that encode, and that add payloads, without a kernel."""

  def run(
    call: Callable[..., PyTree], *args: PyTree, implementation: str | None
  ) -> PyTree:
    if implementation not in (None, "reference"):
      raise NotImplementedError("there is no kernel")
    return call(*args)

  stack = ops.stack_payloads(encode)
  encode_one = functools.partial(run, lambda like, x: encode(x))
  add_all = functools.partial(run, add)
  return [
    ops.Op(name, encode_one, ops.take_array, arrays.NARROW, view=view),
    ops.Op(f"{name}_sum", add_all, lambda x: (stack(x),), arrays.NARROW),
  ]


def _pack_ops(bits: int) -> list[ops.Op]:
  """Returns packing of codes of some bits into words, and its inverse."""

  def encode(like: ShapedLike, codes: Array, **options: Any) -> Array:
    return pack.pack_flat(codes, bits, **options)

  def decode(like: ShapedLike, words: Array, **options: Any) -> Array:
    size = math.prod(like.shape)
    return pack.unpack_flat(words, bits, size, **options)

  def make_codes(x: Array) -> Array:
    words = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return words >> (32 - bits)

  return [
    ops.Op(f"pack{bits}", encode, lambda x: (make_codes(x),), arrays.NARROW),
    ops.Op(
      f"unpack{bits}",
      decode,
      lambda x: (pack.pack_flat(make_codes(x), bits),),
      arrays.NARROW,
    ),
  ]
