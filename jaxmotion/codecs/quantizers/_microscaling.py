"""The codec `microscaling`: narrow floats under a power of two (OCP MX)."""

import dataclasses
import functools
from typing import Any

from jaxmotion import core, kernels
from jaxmotion.codecs import _block_codec, _codec, _laws
from jaxmotion.kernels.microscaling import FORMATS, MicroscalingOp


@dataclasses.dataclass(frozen=True, kw_only=True)
class microscaling(_block_codec.BlockCodec):
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
    >>> import jax.numpy as jnp
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

  def __post_init__(self) -> None:
    core.check_choice("format", self.format, FORMATS)
    kernels.check_block(self.block)

  @property
  def laws(self) -> _laws.Laws:
    """The error of half a unit in the last place of the greatest binade."""
    mantissa = FORMATS[self.format].mantissa
    return _laws.Laws(
      keeps_zeros=True,
      keeps_finite=True,
      idempotent=True,
      contraction=0.9 / self.block,
      bounds_memory=True,
      error=_laws.ErrorBound(
        # Without a mantissa, a third: all beyond 2^127 saturates to it.
        peak=2.0**-mantissa if mantissa else 0.51,
        floor=2.0**-126,
      ),
      nonfinite="block",
    )

  def _check_sharding(self, x: Any) -> None:
    """Raises unless parts of a leading axis can be encoded one by one."""
    _codec.check_unsharded("x", x, 1)

  @functools.cached_property
  def kernel_op(self) -> MicroscalingOp:
    """The kernel op: narrow floats under a power of two."""
    return MicroscalingOp(format=self.format, block=self.block)
