"""The codec `where_smaller`, for leaves of a tree that it makes smaller."""

import dataclasses
import math
from collections.abc import Sequence

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws, _partition
from jaxmotion.codecs.quantizers import _identity
from jaxmotion.core import ShapedLike


@dataclasses.dataclass(frozen=True)
class where_smaller(_partition.TreeCodec):
  """Encodes the leaves that a codec makes smaller; others by another codec.

  A leaf is encoded by `codec` if its payload, times `min_ratio`, is smaller
  than the leaf. The leaf must also be as large as the other arguments say. The
  factors of `low_rank`, for one, are larger than a vector.

  Properties: those of the codec that a leaf gets.

  Args:
    codec: encodes leaves that it makes smaller.
    otherwise: encodes all others.
    min_ratio: least ratio of the leaf's bytes to those of the payload, which a
      leaf must exceed; greater than 0.
    min_size: least number of elements of a leaf.
    min_dimensions: least number of dimensions; 2 leaves vectors out.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion.codecs import low_rank
    >>> codec = where_smaller(low_rank(rank=1))
    >>> payload, _ = codec.encode({"b": jnp.ones(8), "w": jnp.ones((8, 8))},
    ...   codec.init({"b": jnp.ones(8), "w": jnp.ones((8, 8))}))
    >>> [type(p).__name__ for p in payload]
    ['Values', 'Factors']
  """

  codec: _codec.Codec
  otherwise: _codec.Codec = dataclasses.field(
    default_factory=_identity.identity
  )
  min_ratio: float = dataclasses.field(default=1.0, kw_only=True)
  min_size: int = dataclasses.field(default=0, kw_only=True)
  min_dimensions: int = dataclasses.field(default=0, kw_only=True)

  def __post_init__(self) -> None:
    _codec.check_codec("codec", self.codec)
    _codec.check_codec("otherwise", self.otherwise)
    core.check_number("min_ratio", self.min_ratio, 0, 1e9, open_low=True)
    core.check_int("min_size", self.min_size, 0)
    core.check_int("min_dimensions", self.min_dimensions, 0, 32)

  @property
  def laws(self) -> _laws.Laws:
    """The laws that both codecs state."""
    return _laws.weakest_laws([self.codec.laws, self.otherwise.laws])

  @property
  def has_state(self) -> bool:
    """Whether one of the codecs remembers anything between calls."""
    return self.codec.has_state or self.otherwise.has_state

  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[_codec.LeafGroup]:
    """Returns each leaf with the codec that its size decides."""
    _codec.check_leaves(leaves)
    return [
      _codec.LeafGroup((i,), self._choose_codec(like))
      for i, (_, like) in enumerate(leaves)
    ]

  def _choose_codec(self, like: ShapedLike) -> _codec.Codec:
    size = math.prod(like.shape)
    if size < self.min_size or len(like.shape) < self.min_dimensions:
      return self.otherwise
    payload = core.tree_bytes(self.codec.payload_like(like)) * self.min_ratio
    return (
      self.codec if payload < size * like.dtype.itemsize else self.otherwise
    )
