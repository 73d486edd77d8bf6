"""Public functions of narrow floats, which choose an implementation.

No implementation is preferred on a GPU, since XLA makes one pass of each op.
"""

import functools
from typing import Any

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _checks, _dispatch
from jaxmotion.kernels.narrow import _pallas_triton, _reference

_TABLE = {"reference": _reference, "pallas_triton": _pallas_triton}
_run = functools.partial(_dispatch.dispatch, _TABLE)
_FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def cast_encode(
  x: Array, dtype: str, *, implementation: str | None = None
) -> Array:
  """Rounds to a narrower float and returns words of its bits.

  bits(round_to_nearest_even(clip(x, -M, M))), M the greatest finite value.
  Infinity is not clipped, but is NaN in float8_e4m3fn. Every implementation
  returns the same words, with two exceptions. NaN in 16 bits is 0x7fff on a
  GPU, where the conversion keeps neither sign nor payload. Values below 2^-126
  as bfloat16 are zeros on XLA:CPU.

  Args:
    x: floating array of any shape.
    dtype: "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2".
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    uint16 or uint8 of the shape of `x`.

  Example:
    >>> import jax.numpy as jnp
    >>> cast_encode(jnp.array([1.0, 500.0]), "float8_e4m3fn").tolist()
    [56, 126]
  """
  core.check_float("x", x)
  core.check_choice("dtype", dtype, _FORMATS)
  return _run("cast_encode", x, implementation=implementation, dtype=dtype)


def cast_decode(
  words: Array,
  like: ShapedLike,
  dtype: str,
  *,
  implementation: str | None = None,
) -> Array:
  """Returns the floats whose bits the words of `cast_encode` are, exactly.

  Args:
    words: uint16 or uint8.
    like: shape and dtype of the result.
    dtype: format of the words.
    implementation: name of the only implementation to try; None chooses one.
  """
  _check_cast(words, like, dtype)
  return _run(
    "cast_decode", words, implementation=implementation, like=like, dtype=dtype
  )


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
    like: shape and dtype of the array that each worker encoded.
    dtype: format of the words.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.
  """
  _check_cast(words, like, dtype, "workers")
  return _run(
    "cast_sum", words, implementation=implementation, like=like, dtype=dtype
  )


def truncate_encode(
  x: Array,
  bytes: int,
  rounding: str = "zero",
  *,
  implementation: str | None = None,
) -> tuple[Array, ...]:
  """Keeps the most significant bytes of each float32 word.

  From 2 bytes on a NaN keeps a bit of its mantissa, and no finite value rounds
  to infinity. With one byte magnitudes end at 2^127, which also stands for
  infinity and NaN. Every implementation returns the same bytes, except for
  those of a float16 NaN, whose payload a GPU does not keep.

  Args:
    x: floating array of any shape.
    bytes: number of bytes kept, 1 to 4.
    rounding: "zero" (truncation) or "nearest" (ties to even).
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    A uint8 array of the shape of `x` for each byte, most significant first.

  Example:
    >>> import jax.numpy as jnp
    >>> [p.tolist() for p in truncate_encode(jnp.array([1.0, -2.0]), 2)]
    [[63, 192], [128, 0]]
  """
  core.check_float("x", x)
  core.check_int("bytes", bytes, 1, 4)
  core.check_choice("rounding", rounding, ("zero", "nearest"))
  return _run(
    "truncate_encode",
    x,
    implementation=implementation,
    bytes=bytes,
    rounding=rounding,
  )


def truncate_decode(
  planes: tuple[Array, ...],
  like: ShapedLike,
  *,
  implementation: str | None = None,
) -> Array:
  """Returns float32 words whose leading bytes are the planes, the rest zeros.

  Args:
    planes: uint8 arrays, most significant byte first.
    like: shape and dtype of the result.
    implementation: name of the only implementation to try; None chooses one.
  """
  _check_planes(planes, like)
  return _run(
    "truncate_decode", planes, implementation=implementation, like=like
  )


def truncate_sum(
  planes: tuple[Array, ...],
  like: ShapedLike,
  *,
  implementation: str | None = None,
) -> Array:
  """Decodes the planes of several workers and adds them, in one pass.

  Args:
    planes: uint8 [workers, ...] arrays, most significant byte first.
    like: shape and dtype of the array that each worker encoded.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.
  """
  _check_planes(planes, like, "workers")
  return _run("truncate_sum", planes, implementation=implementation, like=like)


def _check_cast(words: Any, like: Any, dtype: Any, *lead: str) -> None:
  core.check_choice("dtype", dtype, _FORMATS)
  core.check_float("like", like)
  bits = jnp.dtype(dtype).itemsize * 8
  _checks.check_words("words", words, (*lead, *like.shape), bits)


def _check_planes(planes: Any, like: Any, *lead: str) -> None:
  """Raises unless `planes` are one to four uint8 arrays like `like`."""
  core.check_float("like", like)
  found = core.check_sequence("planes", planes, "1 to 4 uint8 arrays")
  if not 1 <= len(found) <= 4:
    raise ValueError(
      f"`planes` must be 1 to 4 uint8 arrays, got {len(found)} of them."
    )
  workers: tuple[int | str, ...] = lead
  for i, plane in enumerate(found):
    _checks.check_words(f"planes[{i}]", plane, (*workers, *like.shape), 8)
    workers = tuple(plane.shape[: len(lead)])
