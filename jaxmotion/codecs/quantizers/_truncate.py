"""The codec `truncate`: the leading bytes of each float."""

import dataclasses
from typing import Any, NamedTuple

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import narrow


class BytePlanes(NamedTuple):
  """Payload of the leading bytes of every element, one array per byte.

  Attributes:
    planes: a tuple of uint8 arrays of the array's shape, most significant
      byte first.
  """

  planes: tuple[Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class truncate(_codec.Codec):
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
    >>> import jax.numpy as jnp
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

  def __post_init__(self) -> None:
    core.check_int("bytes", self.bytes, 1, 4)
    core.check_choice("rounding", self.rounding, ("zero", "nearest"))

  @property
  def laws(self) -> _laws.Laws:
    """The relative error of the bits left out; lossless with four bytes."""
    # One byte has every other power of two: to nearest is up to twice x.
    relative = (0.75, 2.0**-7, 2.0**-15, 0.0)[self.bytes - 1]
    if self.rounding == "nearest":
      relative = 1.0 if self.bytes == 1 else relative / 2
    return _laws.Laws(
      lossless=self.bytes == 4,
      keeps_zeros=True,
      keeps_finite=True,
      idempotent=True,
      contraction=1 - relative**2,
      bounds_memory=True,
      error=_laws.ErrorBound(relative=relative, floor=2.0**-125),
      nonfinite="lost" if self.bytes == 1 else "element",
    )

  def _check_sharding(self, x: Any) -> None:
    """Accepts any: elements are encoded one by one."""

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[BytePlanes, PyTree]:
    """Returns `bytes` planes of uint8 of the shape of `x`."""
    self._check_input(x, key, state)
    planes = narrow.truncate_encode(x, self.bytes, self.rounding)
    return BytePlanes(planes), state

  def decode(self, payload: BytePlanes, like: ShapedLike) -> Array:
    """Returns float32 words whose leading bytes are the planes."""
    self._check_payload(payload, like)
    return narrow.truncate_decode(payload.planes, like)

  def sum_decoded(self, payloads: BytePlanes, like: ShapedLike) -> Array:
    """Decodes the payloads of several workers and adds them, in one pass."""
    self._check_payload(payloads, like, stacked=True)
    return narrow.truncate_sum(payloads.planes, like)
