"""Narrower floats and leading bytes: the implementation is chosen here.

No implementation is preferred on a GPU, for XLA makes one pass of each op.
"""

from typing import Any

from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels._dispatch import run


def cast_encode(
  x: Array, dtype: str, *, implementation: str | None = None
) -> Array:
  """Rounds to a narrower float: words of its bits.

  bits(round_to_nearest_even(clip(x, -M, M))), M the greatest finite value;
  infinity is not clipped, but is NaN in float8_e4m3fn. Every implementation
  makes the same words, but for NaN in 16 bits (0x7fff on a GPU, where the
  conversion keeps neither sign nor payload) and values below 2^-126 as
  bfloat16 (zeros on XLA:CPU).

  Args:
    x: floating array of any shape.
    dtype: "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2".
    implementation: the only one to try, by name; None chooses.

  Returns:
    uint16 or uint8 of the shape of `x`.

  Example:
    >>> import jax.numpy as jnp
    >>> cast_encode(jnp.array([1.0, 500.0]), "float8_e4m3fn").tolist()
    [56, 126]
  """
  return _run("cast_encode", implementation, x, dtype=dtype)


def cast_decode(
  words: Array,
  like: ShapedLike,
  dtype: str,
  *,
  implementation: str | None = None,
) -> Array:
  """Returns the values that `cast_encode`'s words spell, exactly.

  Args:
    words: uint16 or uint8.
    like: shape and dtype of the result.
    dtype: format of the words.
    implementation: the only one to try, by name; None chooses.
  """
  return _run("cast_decode", implementation, words, like=like, dtype=dtype)


def cast_sum(
  words: Array,
  like: ShapedLike,
  dtype: str,
  *,
  implementation: str | None = None,
) -> Array:
  """Decodes the words of several workers and adds them, in one pass.

  Args:
    words: uint16 or uint8 [workers, ...].
    like: shape and dtype of the array that each of them encoded.
    dtype: format of the words.
    implementation: the only one to try, by name; None chooses.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.
  """
  return _run("cast_sum", implementation, words, like=like, dtype=dtype)


def truncate_encode(
  x: Array,
  bytes: int,
  rounding: str = "zero",
  *,
  implementation: str | None = None,
) -> tuple[Array, ...]:
  """Keeps the most significant bytes of each float32 word.

  From 2 bytes on a NaN keeps a bit of its mantissa, and no finite value rounds
  to infinity. With one byte magnitudes end at 2^127, where infinity and NaN
  are too. Every implementation makes the same bytes, but for those of a
  float16 NaN, whose payload a GPU does not keep.

  Args:
    x: floating array of any shape.
    bytes: 1 to 4.
    rounding: "zero" (truncation) or "nearest" (ties to even).
    implementation: the only one to try, by name; None chooses.

  Returns:
    A uint8 array of the shape of `x` for each byte, most significant first.

  Example:
    >>> import jax.numpy as jnp
    >>> [p.tolist() for p in truncate_encode(jnp.array([1.0, -2.0]), 2)]
    [[63, 192], [128, 0]]
  """
  return _run(
    "truncate_encode", implementation, x, bytes=bytes, rounding=rounding
  )


def truncate_decode(
  planes: tuple[Array, ...],
  like: ShapedLike,
  *,
  implementation: str | None = None,
) -> Array:
  """Returns the planes as the leading bytes of float32 words, the rest zeros.

  Args:
    planes: uint8 arrays, most significant byte first.
    like: shape and dtype of the result.
    implementation: the only one to try, by name; None chooses.
  """
  return _run("truncate_decode", implementation, planes, like=like)


def truncate_sum(
  planes: tuple[Array, ...],
  like: ShapedLike,
  *,
  implementation: str | None = None,
) -> Array:
  """Decodes the planes of several workers and adds them, in one pass.

  Args:
    planes: uint8 [workers, ...] arrays, most significant byte first.
    like: shape and dtype of the array that each of them encoded.
    implementation: the only one to try, by name; None chooses.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.
  """
  return _run("truncate_sum", implementation, planes, like=like)


def _run(
  op: str, implementation: str | None, *args: PyTree, **static: Any
) -> PyTree:
  return run("narrow", op, *args, implementation=implementation, **static)
