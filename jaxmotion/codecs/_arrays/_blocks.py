"""Codecs of blocks: narrow codes, and a scale for each block."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core, kernels
from jaxmotion.codecs import _bases, _checks, _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import quantize
from jaxmotion.kernels.microscaling import FORMATS, MicroscalingOp
from jaxmotion.kernels.sign import SignOp
from jaxmotion.kernels.ternary import TernaryOp

# A code of `nonnegative` is the 5 low bits of the exponent, above the block's,
# and the first bits of the mantissa.
_EXPONENT = 5
_RANGE = 2**_EXPONENT - 1
_INF = 0x7F800000
_NAN_BASE = 255


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  bits=core.integer(1, 8),
  block=kernels.check_block,
  symmetric=core.boolean,
  rounding=core.choice(("nearest", "stochastic")),
)
class uniform(_bases.BlockCodec):
  """Quantizes each block to evenly spaced levels, packed into words.

  With m = max|x| of the block and L = 2^(bits-1) - 1, symmetric:
  encode(x) = round(x L / m) in -L..L. Then decode(q) = q m / L (one bit: the
  levels are -m and m). Otherwise with the block's minimum a and maximum b:
  encode(x) = round((x - a) (2^bits - 1) / (b - a)), decode inverts it.

  Properties: the error of an element is at most half a step of its block to
  nearest, and one step stochastically. A step is m / L (2 m for one bit) or
  (b - a) / (2^bits - 1), rounded up to 16 significant bits. Stochastic rounding
  is unbiased up to 2^-22 steps with variance at most step^2 / 4. A block whose
  step is below 2^-120 decodes to zero (to its minimum, itself zero if below
  2^-125). Levels past the greatest float are that float. A non-finite element
  makes its whole block decode to NaN.

  Args:
    bits: width of a code, 1 to 8. Widths that are no power of two are packed
      as ones that are, so none is padded.
    block: maximum number of elements under one scale. An array of at most
      `block` elements has one scale; larger ones have a scale for each
      contiguous run.
    symmetric: levels around zero, or from the minimum to the maximum.
    rounding: "nearest" or "stochastic" (needs a key).

  Example:
    >>> x = jnp.array([0.0, 0.5, -1.0])
    >>> codec = uniform(bits=2)
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist()
    [0.0, 1.0, -1.0]

  References:
    Alistarh et al., *QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding*, 2017 (stochastic rounding in buckets).
  """

  bits: int
  block: int = 512
  symmetric: bool = True
  rounding: str = "nearest"

  def _make_laws(self) -> _laws.Laws:
    """States the laws of evenly spaced levels, from the width of a step."""
    levels = 2 ** (self.bits - 1) - 1 if self.bits > 1 else 0.5
    # A step, as a share of the block's greatest magnitude. Scales are rounded
    # up to 16 significant bits.
    step = 1 / levels if self.symmetric else 2 / (2**self.bits - 1)
    nearest = self.rounding == "nearest"
    peak = step * (0.5 if nearest else 1.0) * (1 + 2.0**-14)
    has_zero = self.symmetric and self.bits > 1
    contraction = max(0.0, 1 - self.block * peak**2)
    if has_zero and nearest:
      # No element is off by more than itself, and the greatest hardly at all.
      contraction = max(contraction, 0.99 / self.block)
    return _laws.Laws(
      keeps_zeros=has_zero,
      keeps_finite=True,
      unbiased=not nearest,
      contraction=contraction,
      bounds_memory=peak < 0.99,
      error=_laws.ErrorBound(peak=peak, floor=2.0**-111),
      nonfinite="block",
    )

  def _check_sharding(self, x: Any) -> None:
    """Raises unless parts of a leading axis can be encoded one by one."""
    # Whole words of one part, and no scale of the whole array.
    whole = 8 % self.bits == 0 and x.size > self.block
    _checks.check_unsharded(x, self.block if whole else 0)

  def _make_op(self) -> quantize.UniformOp:
    kind = quantize.AbsmaxOp if self.symmetric else quantize.MinMaxOp
    stochastic = self.rounding == "stochastic"
    return kind(bits=self.bits, block=self.block, stochastic=stochastic)


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(block=kernels.check_block)
class sign(_bases.BlockCodec):
  """Sends the sign of each element and the mean magnitude of each block.

  With s = mean|x| of the block: encode(x) = (x < 0, s), decode = -s or s;
  zero counts as positive.

  Properties: a contraction, ||x - y||^2 = (1 - ||x||_1^2 / (n ||x||_2^2))
  ||x||^2 for a block of n values. It is biased, so use it with `feedback`. A
  block with a non-finite value, or whose magnitudes add up to more than float32
  holds, decodes to non-finite values.

  Args:
    block: maximum number of elements under one scale.

  Example:
    >>> x = jnp.array([1.0, -3.0])
    >>> payload, _ = sign().encode(x)
    >>> sign().decode(payload, x).tolist()
    [2.0, -2.0]

  References:
    Karimireddy et al., *Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes*, 2019.
  """

  block: int = 1024

  def _make_laws(self) -> _laws.Laws:
    """States the laws of signs under a mean magnitude."""
    return _laws.Laws(
      # (sum |x|)^2 / block of the energy is kept, and sum |x| >= ||x||.
      contraction=0.99 / self.block,
      bounds_memory=True,
      # An element is at most the peak, and so is the mean, but for rounding.
      error=_laws.ErrorBound(peak=1 + 2.0**-12, floor=_laws.LEAST_FLOAT32),
      largest=_laws.MAX_FLOAT32 / (2 * self.block),
      nonfinite="block",
    )

  def _make_op(self) -> SignOp:
    return SignOp(block=self.block)


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  block=kernels.check_block,
  rounding=core.choice(("stochastic", "threshold")),
)
class ternary(_bases.BlockCodec):
  """Sends -1, 0 or 1 for each element and a magnitude for each block.

  Stochastic: s = max|x| of the block, encode(x) = sign(x) with probability
  |x| / s, else 0. Threshold: encode(x) = sign(x) where |x| > 0.7 mean|x|, else
  0, and s is the mean of |x| over those that are not 0. decode(c) = c s.
  A 32-bit word holds twenty codes: 1.6 bits per element.

  Properties: stochastic is unbiased up to 2^-24 s with variance |x| (s - |x|).
  Threshold is a contraction, ||x - y||^2 = ||x||^2 - N s^2 with N elements not
  0 and N s^2 >= 0.09 ||x||^2 / n for a block of n. Threshold is biased, so use
  it with `feedback`. Zero stays zero. A block whose scale is below 2^-126
  decodes to zero. A non-finite element makes its whole block decode to NaN, as
  do, by threshold, magnitudes whose sum over the block is beyond float32.

  Args:
    block: maximum number of elements under one scale.
    rounding: "stochastic" (needs a key) or "threshold".

  Example:
    >>> x = jnp.array([1.0, -3.0, 0.5, 0.0])
    >>> codec = ternary(rounding="threshold")
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist()
    [2.0, -2.0, 0.0, 0.0]

  References:
    Wen et al., *TernGrad: Ternary Gradients to Reduce Communication in
    Distributed Deep Learning*, 2017 (stochastic). Li and Liu, *Ternary Weight
    Networks*, 2016 (threshold).
  """

  block: int = 1024
  rounding: str = "stochastic"

  def _make_laws(self) -> _laws.Laws:
    """States the laws of three levels, drawn or by threshold."""
    by_threshold = self.rounding == "threshold"
    most = _laws.MAX_FLOAT32
    return _laws.Laws(
      keeps_zeros=True,
      keeps_finite=not by_threshold,
      unbiased=not by_threshold,
      # Elements below 0.7 of the mean are dropped: what is left of sum |x| is
      # 0.3, of the energy (0.3 sum |x|)^2 / block >= 0.09 ||x||^2 / block.
      contraction=0.089 / self.block if by_threshold else 0.0,
      bounds_memory=by_threshold,
      error=_laws.ErrorBound(peak=1 + 2.0**-12, floor=_laws.LEAST_FLOAT32),
      largest=most / (2 * self.block) if by_threshold else most,
      nonfinite="block",
    )

  def _make_op(self) -> TernaryOp:
    stochastic = self.rounding == "stochastic"
    return TernaryOp(block=self.block, stochastic=stochastic)


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(format=core.choice(FORMATS), block=kernels.check_block)
class microscaling(_bases.BlockCodec):
  """Blocks of 4-, 6- or 8-bit floats that share a power-of-two scale.

  "float4_e3m0" is that of streaming DiLoCo, whose paper leaves its scale, zero
  and rounding open. Here the greatest value is the power of two that is nearest
  to max|x|. Smaller values are 2^-1 to 2^-6 of it, or zero; an element takes
  the nearest one. For the others:

  Let M be the format's greatest value, emax its exponent, and
  X = 2^(floor(log2 max|x|) - emax) of the block. Then
  encode(x) = (round(clip(x / X, -M, M)) to nearest even, log2(X) + 127 in 8
  bits). Decode multiplies.

  Properties: |decode(encode(x)) - x| <= max(2^-(m + 1) |x|, 2^-m X / 2^bias)
  for m mantissa bits where |x| <= M X. Beyond that it saturates, and the error
  is less than 2^(emax + 1) X - M X. Idempotent; signs are kept, also of zeros.
  A non-finite element makes its whole block decode to NaN. Values below 2^-126
  count as zero, in and out.

  Args:
    format: of an element, "float8_e4m3fn", "float8_e5m2", "float6_e3m2fn",
      "float6_e2m3fn", "float4_e2m1fn" or "float4_e3m0".
    block: number of elements under one scale, a contiguous run; 32 is MX.

  Example:
    >>> x = jnp.array([1.0, 0.3, -7.0])
    >>> codec = microscaling(format="float4_e2m1fn")
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist()
    [1.0, 0.5, -6.0]

  References:
    Open Compute Project, *OCP Microscaling Formats (MX) Specification v1.0*,
    2023. Rouhani et al., *Microscaling Data Formats for Deep Learning*, 2023.
    Douillard et al., *Streaming DiLoCo*, 2025 (E3M0).
  """

  format: str
  block: int = 32

  def _make_laws(self) -> _laws.Laws:
    """States the laws of narrow floats, from the width of their mantissa."""
    mantissa = FORMATS[self.format].mantissa
    return dataclasses.replace(
      _laws.ROUNDED,
      # Of the greatest element, which has 1 / block of the energy at least.
      contraction=0.9 / self.block,
      error=_laws.ErrorBound(
        # Without a mantissa, a third: all beyond 2^127 saturates to it.
        peak=2.0**-mantissa if mantissa else 0.51,
        floor=_laws.LEAST_FLOAT32,
      ),
      nonfinite="block",
    )

  def _check_sharding(self, x: Any) -> None:
    """Raises unless parts of a leading axis can be encoded one by one."""
    _checks.check_unsharded(x, 1)

  def _make_op(self) -> MicroscalingOp:
    return MicroscalingOp(format=self.format, block=self.block)


class Unsigned(NamedTuple):
  """Payload of codes and the least exponents of their blocks."""

  # uint8 or uint16[blocks, width], flat, the last block padded.
  codes: Array
  # uint8[blocks], b for values of 2^(b - 127) and more; 255 for NaN.
  base: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  bits=core.choice((8, 16)),
  block=kernels.check_block,
  rounding=core.choice(("nearest", "stochastic")),
)
class nonnegative(_bases.ArrayCodec):
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

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.rounding == "stochastic"

  def _make_laws(self) -> _laws.Laws:
    """States the laws of values that are never rounded to zero."""
    return _laws.Laws(
      keeps_zeros=True,
      keeps_finite=True,
      idempotent=True,
      # Exponents of a block span 2^31; what is less than that of its peak is
      # rounded up to the least code.
      error=_laws.ErrorBound(
        relative=1.0, peak=2.0**-30, floor=2 * _laws.LEAST_FLOAT32
      ),
      nonfinite="block",
    )

  def _check_sharding(self, x: Any) -> None:
    """Raises unless parts of a leading axis can be encoded one by one."""
    _checks.check_unsharded(x, 1)

  def _encode(self, x: Array, key: core.Key | None) -> Unsigned:
    """Returns a code per element, and one exponent per block."""
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
    )

  def _decode(self, payload: Unsigned, like: ShapedLike) -> Array:
    """Returns the values of the codes under their exponents."""
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


@dataclasses.dataclass(frozen=True)
@core.declare(codec=_codec.check_codec)
class vote(_bases.ArrayCodec):
  """Takes the sign that most workers have, -1, 0 or 1.

  encode(x) = the signs of x; the mean over workers is the sign of the sum of
  their signs. A zero abstains, and a tie is zero.

  Properties: of unit magnitude whatever the gradient's, so that one worker's
  outlier has one vote; biased. An element that is not finite decodes to NaN.

  Args:
    codec: of the signs: `ternary(rounding="threshold")`, 1.6 bits, or `sign()`,
      1 bit, under which zeros count as positive; so do ties of more than two
      workers.

  Example:
    >>> codec, x = vote(), jnp.array([[3.0, -1.0], [1.0, -9.0], [-5.0, 0.0]])
    >>> payloads = jax.vmap(lambda x: codec.encode(x)[0])(x)
    >>> (codec.sum_decoded(payloads, x[0]) / 3).tolist()
    [1.0, -1.0]

  References:
    Bernstein et al., *signSGD with Majority Vote is Communication Efficient and
    Fault Tolerant*, 2019.
  """

  codec: _codec.Codec = dataclasses.field(
    default_factory=lambda: ternary(rounding="threshold")
  )

  def __post_init__(self) -> None:
    exact = isinstance(self.codec, sign) or (
      isinstance(self.codec, ternary) and not self.codec.needs_key
    )
    if not exact:
      raise ValueError(
        '`codec` must keep signs: `ternary(rounding="threshold")` or `sign()`,'
        f" got {self.codec!r}."
      )

  def _make_laws(self) -> _laws.Laws:
    return _laws.Laws(
      keeps_zeros=self.codec.laws.keeps_zeros,
      keeps_finite=True,
      idempotent=True,
      nonfinite=self.codec.laws.nonfinite,
    )

  def _encode(self, x: Array, key: core.Key | None) -> PyTree:
    # NaN stands for what is not finite.
    signs = jnp.where(jnp.isfinite(x), jnp.sign(x), jnp.nan)
    return self.codec.encode(signs.astype(jnp.float32))[0]

  def _decode(self, payload: PyTree, like: ShapedLike) -> Array:
    signs = jnp.sign(self.codec.decode(payload, _bases.widen(like)))
    return signs.astype(like.dtype)

  def _sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Returns the sign that most workers have, times their number."""
    workers = jax.tree.leaves(payloads)[0].shape[0]
    votes = super()._sum_decoded(payloads, _bases.widen(like))
    return jnp.sign(votes) * workers
