"""The codec `sign`: one bit per element."""

import dataclasses
import functools

import jax.numpy as jnp

from jaxmotion import kernels
from jaxmotion.codecs import _block_codec, _laws
from jaxmotion.kernels.sign import SignOp


@dataclasses.dataclass(frozen=True, kw_only=True)
class sign(_block_codec.BlockCodec):
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
    >>> import jax.numpy as jnp
    >>> x = jnp.array([1.0, -3.0])
    >>> payload, _ = sign().encode(x)
    >>> sign().decode(payload, x).tolist()
    [2.0, -2.0]

  References:
    Karimireddy et al., *Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes*, 2019.
  """

  block: int = 1024

  def __post_init__(self) -> None:
    kernels.check_block(self.block)

  @property
  def laws(self) -> _laws.Laws:
    """The contraction by at least one element of each block."""
    return _laws.Laws(
      contraction=0.99 / self.block,
      bounds_memory=True,
      error=_laws.ErrorBound(peak=1 + 2.0**-12, floor=2.0**-126),
      largest=float(jnp.finfo(jnp.float32).max) / (2 * self.block),
      nonfinite="block",
    )

  @functools.cached_property
  def kernel_op(self) -> SignOp:
    """The kernel op: signs and mean magnitudes."""
    return SignOp(block=self.block)
