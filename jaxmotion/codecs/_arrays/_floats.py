"""Codecs of single elements: unchanged, rounded, or their leading bytes."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _bases, _laws
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import narrow

_FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


class ElementCodec(_bases.ArrayCodec):
  """Codec that encodes elements one by one, wherever they are."""

  def _check_sharding(self, x: Any) -> None:
    """Accepts arrays of any sharding."""


class Values(NamedTuple):
  """Payload of unchanged elements, or of those that another codec encodes."""

  values: Array


@dataclasses.dataclass(frozen=True)
class identity(ElementCodec):
  """Leaves arrays as they are: the exchange of plain data-parallel training.

  encode(x) = x; decode(p) = p.

  Properties: lossless; summable (an all-reduce is `lax.psum` itself, bit for
  bit; the backend may widen what it sums: XLA:CPU sends bfloat16 as float32).
  float16 travels as it is and is added up in float32, which holds the sum.
  Non-finite elements pass through.

  Example:
    >>> x = jnp.arange(3.0)
    >>> payload, _ = identity().encode(x)
    >>> identity().decode(payload, x).tolist()
    [0.0, 1.0, 2.0]
  """

  summable = True
  linear = True
  keeps_dtype = True
  laws = _laws.PERMUTED

  def _encode(self, x: Array, key: core.Key | None) -> Values:
    return Values(x)

  def _decode(self, payload: Values, like: ShapedLike) -> Array:
    return payload.values.reshape(like.shape).astype(like.dtype)


class Words(NamedTuple):
  """Payload of floats as machine words."""

  words: Array  # uint8 or uint16, the shape of the array.


@dataclasses.dataclass(frozen=True)
@core.declare(dtype=core.choice(_FORMATS))
class cast(ElementCodec):
  """Rounds to a narrower float, carried as words of its bits.

  encode(x) = bits(round_to_nearest_even(clip(x, -M, M))), M the format's
  greatest finite value; decode inverts the bits exactly.

  Properties: |decode(encode(x)) - x| <= 2^-(m + 1) |x| for m mantissa bits in
  the format's normal range; idempotent. Finite values saturate; NaN stays NaN;
  infinity stays infinite, or becomes NaN in float8_e4m3fn, which has none.

  Words, because backends widen narrow floats on the wire: XLA:CPU gathers
  bfloat16 as float32.

  Args:
    dtype: "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2".

  Example:
    >>> x = jnp.array([1.0, 1000.0])
    >>> codec = cast("float8_e4m3fn")
    >>> payload, _ = codec.encode(x)
    >>> payload.words.dtype.name, codec.decode(payload, x).tolist()
    ('uint8', [1.0, 448.0])

  References:
    Micikevicius et al., *FP8 Formats for Deep Learning*, 2022.
  """

  dtype: str

  def _make_laws(self) -> _laws.Laws:
    """States the laws of rounding to a narrow float."""
    info = jnp.finfo(self.dtype)
    relative = 2.0 ** -(info.nmant + 1)
    floor = max(float(info.smallest_subnormal) / 2, _laws.LEAST_FLOAT32)
    return dataclasses.replace(
      _laws.ROUNDED,
      contraction=1 - relative**2,
      error=_laws.ErrorBound(relative=relative, floor=floor),
      largest=float(info.max),
      nonfinite="element",
    )

  def _encode(self, x: Array, key: core.Key | None) -> Words:
    return Words(narrow.cast_encode(x, self.dtype))

  def _decode(self, payload: Words, like: ShapedLike) -> Array:
    return narrow.cast_decode(payload.words, like, self.dtype)

  def _sum_decoded(self, payloads: Words, like: ShapedLike) -> Array:
    return narrow.cast_sum(payloads.words, like, self.dtype)


class BytePlanes(NamedTuple):
  """Payload of the leading bytes of every element, one array per byte."""

  planes: tuple[Array, ...]  # uint8, of the array's shape; the highest first.


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  bytes=core.integer(1, 4), rounding=core.choice(("zero", "nearest"))
)
class truncate(ElementCodec):
  """Keeps the most significant bytes of each float32 word.

  encode(x) = the first `bytes` bytes of bits(x), one plane a byte; decode
  fills the rest with zeros. One byte is the sign and 7 bits of the exponent,
  two are bfloat16's layout.

  Properties: |y| <= |x| toward zero. The relative error of a normal value is
  below 3/4, 2^-7 and 2^-15 for 1, 2 and 3 bytes. To nearest it is half of that,
  from 2 bytes on. Lossless with 4; idempotent. With one byte that holds from
  2^-125 up. Biased toward zero unless `nearest`, and finite values saturate.
  From 2 bytes on a NaN stays a NaN (its quiet bit is set where truncation would
  leave an infinity). One byte holds neither: every value from 2^127 up,
  infinity and NaN included, decodes to 2^127 with its sign.

  Args:
    bytes: 1 to 4.
    rounding: "zero" (truncation) or "nearest" (ties to even).

  Example:
    >>> x = jnp.array([1.0, 3.14159274])
    >>> codec = truncate(bytes=2)
    >>> payload, _ = codec.encode(x)
    >>> len(payload.planes), codec.decode(payload, x).tolist()
    (2, [1.0, 3.140625])

  References:
    Zhuang, Malossi and Casas, *Reducing Data Motion to Accelerate the Training
    of Deep Neural Networks*, 2020 (the approximate data transfer).
  """

  bytes: int
  rounding: str = "zero"

  def _make_laws(self) -> _laws.Laws:
    """States the laws of the leading bytes of a float32."""
    # Two bytes have 7 bits of the mantissa, three have 15. One byte has every
    # other power of two: to zero is a quarter of x at least, to nearest up to
    # twice x.
    relative = (0.75, 2.0**-7, 2.0**-15, 0.0)[self.bytes - 1]
    if self.rounding == "nearest":
      relative = 1.0 if self.bytes == 1 else relative / 2
    return dataclasses.replace(
      _laws.ROUNDED,
      lossless=self.bytes == 4,
      contraction=1 - relative**2,
      error=_laws.ErrorBound(relative=relative, floor=2 * _laws.LEAST_FLOAT32),
      nonfinite="lost" if self.bytes == 1 else "element",
    )

  def _encode(self, x: Array, key: core.Key | None) -> BytePlanes:
    return BytePlanes(narrow.truncate_encode(x, self.bytes, self.rounding))

  def _decode(self, payload: BytePlanes, like: ShapedLike) -> Array:
    return narrow.truncate_decode(payload.planes, like)

  def _sum_decoded(self, payloads: BytePlanes, like: ShapedLike) -> Array:
    return narrow.truncate_sum(payloads.planes, like)
