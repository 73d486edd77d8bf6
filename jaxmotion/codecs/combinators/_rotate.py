"""The codec `rotate`, which spreads large elements over their block."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.codecs.quantizers import _identity
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import rotate as kernel

_BLOCKS = (32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class rotate(_codec.Codec):
  """Rotates each block by a random Hadamard matrix, for a codec to follow.

  encode(x) = H diag(s) x / sqrt(block) for each contiguous block, s = -1 or 1
  by a hash of (seed, position); decode(y) = diag(s) H y / sqrt(block). It does
  not compress by itself: in `chain(rotate(), uniform(bits=4))` it spreads
  outliers, so that max|y| of a block is about sqrt(2 log(2 block) / block)
  ||x|| whatever x.

  Properties: lossless up to float32 rounding, |decode(encode(x)) - x| <= 2^-13
  ||x|| of its block and 2^-21 ||x|| on typical data; preserves the norm up to
  the same; linear, and the same on all workers, so that payloads may be added
  (summable). A non-finite element makes its block decode to non-finite values,
  as may a block whose norm is near the end of float32.

  Args:
    block: 32, 64, 128 or 256. An array that is shorter is one block of the
      next power of two.
    seed: of the signs, 0 to 2^32 - 1.

  Example:
    >>> import jax.numpy as jnp
    >>> x = jnp.array([0.0, 8.0, 0.0, 0.0])
    >>> payload, _ = rotate().encode(x)
    >>> jnp.abs(payload.values).tolist(), rotate().decode(payload, x).tolist()
    ([[4.0, 4.0, 4.0, 4.0]], [0.0, 8.0, 0.0, 0.0])

  References:
    Suresh et al., *Distributed Mean Estimation with Limited Communication*,
    2017.
  """

  summable: ClassVar[bool] = True
  linear: ClassVar[bool] = True

  block: int = 128
  seed: int = 0

  def __post_init__(self) -> None:
    core.check_int("block", self.block, 1)
    core.check_choice("block", self.block, _BLOCKS)
    core.check_int("seed", self.seed, 0, 2**32 - 1)

  @property
  def laws(self) -> _laws.Laws:
    """The laws of an orthogonal matrix, up to float32 rounding."""
    most = float(jnp.finfo(jnp.float32).max)
    root = self.block**0.5
    return _laws.Laws(
      projects=True,
      contraction=1.0,
      bounds_memory=True,
      error=_laws.ErrorBound(
        peak=2.0**-13 * root, floor=2.0**-126 * self.block
      ),
      largest=most / (4 * self.block),
      nonfinite="block",
    )

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[_identity.Values, PyTree]:
    """Returns float32[blocks, block] and the state."""
    self._check_input(x, key, state)
    return _identity.Values(kernel.rotate(x, self.block, self.seed)), state

  def decode(self, payload: _identity.Values, like: ShapedLike) -> Array:
    """Returns the rows rotated back."""
    self._check_payload(payload, like)
    return kernel.rotate_back(payload.values, like, self.seed)
