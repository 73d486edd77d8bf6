"""Narrower floating-point formats."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs._base import Codec
from jaxmotion.core import Array, Key, Like, PyTree, check_choice

_FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


class Words(NamedTuple):
  """Values as machine words.

  Attributes:
    words: uint8 or uint16, the shape of the array.
  """

  words: Array


@dataclasses.dataclass(frozen=True)
class cast(Codec):
  """Rounds to a narrower float, carried as words of its bits.

  encode(x) = bits(round_to_nearest_even(clip(x, -M, M))), M the format's
  greatest finite value; decode inverts the bits exactly.

  Laws: |decode(encode(x)) - x| <= 2^-(m + 1) |x| for m mantissa bits in the
  format's normal range; idempotent. Finite values saturate; NaN stays NaN;
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

  def __post_init__(self) -> None:
    check_choice("dtype", self.dtype, _FORMATS)

  def encode(
    self, x: Array, state: PyTree = (), key: Key | None = None
  ) -> tuple[Words, PyTree]:
    """Returns uint16 (uint8) words of the shape of `x`."""
    self._check(x, key)
    most = float(jnp.finfo(self.dtype).max)
    y = x.astype(jnp.float32)
    y = jnp.where(jnp.isinf(y), y, jnp.clip(y, -most, most))
    word = jnp.uint8 if jnp.dtype(self.dtype).itemsize == 1 else jnp.uint16
    return Words(lax.bitcast_convert_type(y.astype(self.dtype), word)), state

  def decode(self, payload: Words, like: Like) -> Array:
    """Returns the values the words spell."""
    self._check_payload(payload, like)
    y = lax.bitcast_convert_type(payload.words, jnp.dtype(self.dtype))
    return y.reshape(like.shape).astype(like.dtype)
