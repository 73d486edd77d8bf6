"""The codec `ternary`: three levels per element."""

import dataclasses
import functools

import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _block_codec, _laws
from jaxmotion.kernels.ternary import TernaryOp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ternary(_block_codec.BlockCodec):
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
    >>> import jax.numpy as jnp
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

  def __post_init__(self) -> None:
    kernels.check_block(self.block)
    core.check_choice("rounding", self.rounding, ("stochastic", "threshold"))

  @property
  def laws(self) -> _laws.Laws:
    """The laws of unbiased rounding, or by threshold of a contraction."""
    by_threshold = self.rounding == "threshold"
    most = float(jnp.finfo(jnp.float32).max)
    return _laws.Laws(
      keeps_zeros=True,
      keeps_finite=not by_threshold,
      unbiased=not by_threshold,
      contraction=0.089 / self.block if by_threshold else 0.0,
      bounds_memory=by_threshold,
      error=_laws.ErrorBound(peak=1 + 2.0**-12, floor=2.0**-126),
      largest=most / (2 * self.block) if by_threshold else most,
      nonfinite="block",
    )

  @functools.cached_property
  def kernel_op(self) -> TernaryOp:
    """The kernel op: three levels per block."""
    return TernaryOp(block=self.block, stochastic=self.rounding == "stochastic")
