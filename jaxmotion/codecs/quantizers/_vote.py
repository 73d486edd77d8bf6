"""The codec `vote`: the sign that most workers have."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _codec, _laws
from jaxmotion.codecs.quantizers import _sign, _ternary
from jaxmotion.core import Array, PyTree, ShapedLike


@dataclasses.dataclass(frozen=True)
class vote(_codec.Codec):
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
    default_factory=lambda: _ternary.ternary(rounding="threshold")
  )

  def __post_init__(self) -> None:
    _codec.check_codec("codec", self.codec)
    exact = isinstance(self.codec, _sign.sign) or (
      isinstance(self.codec, _ternary.ternary) and not self.codec.needs_key
    )
    if not exact:
      raise ValueError(
        '`codec` must keep signs: `ternary(rounding="threshold")` or `sign()`,'
        f" got {self.codec!r}."
      )

  @property
  def laws(self) -> _laws.Laws:
    """The laws of signs."""
    return _laws.Laws(
      keeps_zeros=self.codec.laws.keeps_zeros,
      keeps_finite=True,
      idempotent=True,
      nonfinite=self.codec.laws.nonfinite,
    )

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Encodes the signs, and NaN in place of what is not finite."""
    self._check_input(x, key, state)
    signs = jnp.where(jnp.isfinite(x), jnp.sign(x), jnp.nan)
    return self.codec.encode(signs.astype(jnp.float32))

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Returns the signs as numbers."""
    self._check_payload(payload, like)
    wide = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    return jnp.sign(self.codec.decode(payload, wide)).astype(like.dtype)

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Returns the sign that most workers have, times their number."""
    self._check_payload(payloads, like, stacked=True)
    wide = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    workers = jax.tree.leaves(payloads)[0].shape[0]
    return jnp.sign(kernels.sum_decoded(self.decode, payloads, wide)) * workers
