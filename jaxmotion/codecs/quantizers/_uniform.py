"""The codec `uniform`: evenly spaced levels under a scale per block."""

import dataclasses
import functools
from typing import Any

from jaxmotion import core, kernels
from jaxmotion.codecs import _block_codec, _codec, _laws
from jaxmotion.kernels import quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class uniform(_block_codec.BlockCodec):
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
    >>> import jax.numpy as jnp
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

  def __post_init__(self) -> None:
    core.check_int("bits", self.bits, 1, 8)
    kernels.check_block(self.block)
    core.check_choice("symmetric", self.symmetric, (True, False))
    core.check_choice("rounding", self.rounding, ("nearest", "stochastic"))

  @property
  def laws(self) -> _laws.Laws:
    """The error of a share of a block's step; see the class."""
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
    _codec.check_unsharded("x", x, self.block if whole else 0)

  @functools.cached_property
  def kernel_op(self) -> quantize.UniformOp:
    """The kernel op: levels around zero, or from minimum to maximum."""
    kind = quantize.AbsmaxOp if self.symmetric else quantize.MinMaxOp
    stochastic = self.rounding == "stochastic"
    return kind(bits=self.bits, block=self.block, stochastic=stochastic)
