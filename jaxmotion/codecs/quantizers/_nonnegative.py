"""The codec `nonnegative`: floats of 8 or 16 bits without sign."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmotion import core, kernels
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike

# A code is the 5 low bits of the exponent, above the block's, and the first
# bits of the mantissa.
_EXPONENT = 5
_RANGE = 2**_EXPONENT - 1
_INF = 0x7F800000
_NAN_BASE = 255


class Unsigned(NamedTuple):
  """Payload of codes and the least exponents of their blocks.

  Attributes:
    codes: uint8 or uint16[blocks, width], flat, the last block padded.
    base: uint8[blocks], b for values of 2^(b - 127) and more; 255 for NaN.
  """

  codes: Array
  base: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class nonnegative(_codec.Codec):
  """Rounds values >= 0 to 8-bit floats that share an exponent (UE5M3).

  For the second moments of an optimizer, which divides by their roots. Let
  M = 8, and b such that a block's maximum is in binade b + 31 or, rounded up,
  at its end. b is at least -126. A code c > 0 stands for
  2^(b + c // M) (1 + (c % M) / M), 0 for zero. That is 32 binades of eight
  levels. With 16 bits M is 2048 (UE5M11).

  Properties: |decode(encode(x)) - x| is at most x / 2M to nearest and below
  x / M stochastically, from the least level (1 + 1/M) 2^b up. Below that level,
  x decodes to it unless it is zero, so nothing above zero decodes to zero.
  Stochastic rounding is unbiased from there up; idempotent. Negative values
  count as zero. Finite values saturate; a non-finite one makes its whole block
  decode to NaN.

  Args:
    bits: of a code, 8 or 16.
    block: maximum number of elements that share an exponent, a contiguous
      run.
    rounding: "nearest" or "stochastic" (needs a key).

  Example:
    >>> import jax.numpy as jnp
    >>> x = jnp.array([1.0, 1e-6, 1e-30, 0.0])
    >>> payload, _ = nonnegative().encode(x)
    >>> nonnegative().decode(payload, x).tolist()
    [1.0, 9.5367431640625e-07, 5.238689482212067e-10, 0.0]

  References:
    Dettmers et al., *8-bit Optimizers via Block-wise Quantization*, 2022 (a
    second moment needs levels in many binades). Li, Chen and Zhu, *Memory
    Efficient Optimizers with 4-bit States*, 2023 (and must not become zero).
  """

  bits: int = 8
  block: int = 256
  rounding: str = "nearest"

  def __post_init__(self) -> None:
    core.check_choice("bits", self.bits, (8, 16))
    kernels.check_block(self.block)
    core.check_choice("rounding", self.rounding, ("nearest", "stochastic"))

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.rounding == "stochastic"

  @property
  def laws(self) -> _laws.Laws:
    """The laws of a codec that no error memory holds: it drops all signs."""
    return _laws.Laws(
      keeps_zeros=True,
      keeps_finite=True,
      idempotent=True,
      error=_laws.ErrorBound(relative=1.0, peak=2.0**-30, floor=2.0**-125),
      nonfinite="block",
    )

  def _check_sharding(self, x: Any) -> None:
    """Raises unless parts of a leading axis can be encoded one by one."""
    _codec.check_unsharded("x", x, 1)

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[Unsigned, PyTree]:
    """Returns a byte per element and one per block, and the state."""
    self._check_input(x, key, state)
    bits = self._to_blocks(x)
    mantissa, drop = self._mantissa, 23 - self._mantissa
    peak = jnp.max(bits, axis=1, keepdims=True, initial=0)
    # The binade that the maximum may be rounded up to, or it could not grow
    # past the last level of its own.
    top = jnp.minimum((peak + (2**drop - 1)) >> 23, 254)
    # At least 1: subnormal numbers count as zero in arithmetic.
    base = jnp.maximum(top - _RANGE, 1)
    if self.needs_key:
      assert key is not None
      add = core.random_words(key.worker, bits.shape) >> (32 - drop)
      add = add.astype(jnp.int32)
    else:
      add = jnp.int32(2 ** (drop - 1))
    codes = ((bits + add) >> drop) - (base << mantissa)
    codes = jnp.where(bits > 0, jnp.clip(codes, 1, 2**self.bits - 1), 0)
    base = jnp.where(peak >= _INF, _NAN_BASE, base)
    return Unsigned(
      codes.astype(f"uint{self.bits}"), base[:, 0].astype(jnp.uint8)
    ), state

  def decode(self, payload: Unsigned, like: ShapedLike) -> Array:
    """Returns the values of the codes under their exponents."""
    self._check_payload(payload, like)
    codes = payload.codes.astype(jnp.int32)
    base = payload.base.astype(jnp.int32)[:, None]
    bits = (codes + (base << self._mantissa)) << (23 - self._mantissa)
    bits = jnp.where(codes > 0, bits, 0)
    y = lax.bitcast_convert_type(bits, jnp.float32)
    y = jnp.where(base == _NAN_BASE, jnp.nan, y)
    y = y.reshape(-1)[: like.size].reshape(like.shape)
    return core.saturate_cast(y, like.dtype)

  @property
  def _mantissa(self) -> int:
    """Bits of a code that are the mantissa's; a float32 has 23."""
    return self.bits - _EXPONENT

  def _to_blocks(self, x: Array) -> Array:
    """Returns the bits of the elements, int32[blocks, width]; 0 if negative."""
    _, blocks, width = kernels.block_shape(x.shape, 1, self.block)
    flat = x.reshape(-1).astype(jnp.float32)
    padding = blocks * width - x.size
    flat = jnp.pad(flat, (0, padding)) if padding else flat
    bits = lax.bitcast_convert_type(flat.reshape(blocks, width), jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    return jnp.where((bits < 0) & (magnitude < _INF), 0, magnitude)
