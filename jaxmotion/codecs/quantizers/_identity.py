"""The codec `identity`, which does not compress."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike


class Values(NamedTuple):
  """Payload of unchanged elements.

  Attributes:
    values: the array itself.
  """

  values: Array


@dataclasses.dataclass(frozen=True)
class identity(_codec.Codec):
  """Leaves arrays as they are: the exchange of plain data-parallel training.

  encode(x) = x; decode(p) = p.

  Properties: lossless; summable (an all-reduce is `lax.psum` itself, bit for
  bit; the backend may widen what it sums: XLA:CPU sends bfloat16 as float32).
  float16 travels as it is and is added up in float32, which holds the sum.
  Non-finite elements pass through.

  Example:
    >>> import jax.numpy as jnp
    >>> x = jnp.arange(3.0)
    >>> payload, _ = identity().encode(x)
    >>> identity().decode(payload, x).tolist()
    [0.0, 1.0, 2.0]
  """

  summable: ClassVar[bool] = True
  linear: ClassVar[bool] = True

  @property
  def laws(self) -> _laws.Laws:
    """The laws of a codec that loses nothing."""
    return dataclasses.replace(_laws.LOSSLESS, projects=True)

  @property
  def keeps_dtype(self) -> bool:
    """True: a narrow float is sent as it is."""
    return True

  def _check_sharding(self, x: Any) -> None:
    """Accepts any: elements are encoded one by one."""

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[Values, PyTree]:
    """Returns the array as the payload."""
    self._check_input(x, key, state)
    return Values(x), state

  def decode(self, payload: Values, like: ShapedLike) -> Array:
    """Returns the array of the payload."""
    self._check_payload(payload, like)
    return payload.values.reshape(like.shape).astype(like.dtype)
