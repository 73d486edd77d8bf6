"""The codec `cast`, which rounds to narrower floats."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import narrow

_FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


class Words(NamedTuple):
  """Payload of floats as machine words.

  Attributes:
    words: uint8 or uint16, the shape of the array.
  """

  words: Array


@dataclasses.dataclass(frozen=True)
class cast(_codec.Codec):
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
    >>> import jax.numpy as jnp
    >>> x = jnp.array([1.0, 1000.0])
    >>> codec = cast("float8_e4m3fn")
    >>> payload, _ = codec.encode(x)
    >>> payload.words.dtype.name, codec.decode(payload, x).tolist()
    ('uint8', [1.0, 448.0])

  References:
    Micikevicius et al., *FP8 Formats for Deep Learning*, 2022.
  """

  dtype: str

  def __post_init__(self) -> None:
    core.check_choice("dtype", self.dtype, _FORMATS)

  @property
  def laws(self) -> _laws.Laws:
    """The relative error in the format's range, and saturation beyond it."""
    info = jnp.finfo(self.dtype)
    relative = 2.0 ** -(info.nmant + 1)
    # Elements below 2^-126 count as zero in arithmetic.
    floor = max(float(info.smallest_subnormal) / 2, 2.0**-126)
    return _laws.Laws(
      keeps_zeros=True,
      keeps_finite=True,
      idempotent=True,
      contraction=1 - relative**2,
      bounds_memory=True,
      error=_laws.ErrorBound(relative=relative, floor=floor),
      largest=float(info.max),
      nonfinite="element",
    )

  def _check_sharding(self, x: Any) -> None:
    """Accepts any: elements are encoded one by one."""

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[Words, PyTree]:
    """Returns uint16 (uint8) words of the shape of `x`."""
    self._check_input(x, key, state)
    return Words(narrow.cast_encode(x, self.dtype)), state

  def decode(self, payload: Words, like: ShapedLike) -> Array:
    """Returns the floats whose bits the words are."""
    self._check_payload(payload, like)
    return narrow.cast_decode(payload.words, like, self.dtype)

  def sum_decoded(self, payloads: Words, like: ShapedLike) -> Array:
    """Decodes the payloads of several workers and adds them, in one pass."""
    self._check_payload(payloads, like, stacked=True)
    return narrow.cast_sum(payloads.words, like, self.dtype)
