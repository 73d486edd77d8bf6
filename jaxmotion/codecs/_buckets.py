"""Many small leaves as few arrays."""

import dataclasses
import math
from collections.abc import Sequence

from jaxmotion.codecs._checks import check_codec
from jaxmotion.codecs._codec import Codec, LeafGroup
from jaxmotion.codecs._partition import TreeCodec
from jaxmotion.core import ShapedLike, check_int


@dataclasses.dataclass(frozen=True)
class buckets(TreeCodec):
  """Concatenates small leaves of one dtype and codec before encoding them.

  A leaf of a few values pays for scales and padding of its own; together they
  pay once. Large leaves stay alone: concatenating them would cost a copy and
  gain nothing (all payloads travel in one buffer in any case).

  Laws: those of the codec that an array gets; a block may span leaves.

  Args:
    codec: encodes the arrays; may itself be `rules`.
    small: leaves of at most this many values are concatenated.
    most: the most values in one bucket.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> grads = {"a": jnp.ones(5), "b": jnp.ones(7), "c": jnp.ones(10_000)}
    >>> payload, _ = codecs.buckets(codecs.sign()).encode(grads)
    >>> len(payload)
    2
  """

  codec: Codec
  small: int = dataclasses.field(default=4096, kw_only=True)
  most: int = dataclasses.field(default=1 << 20, kw_only=True)

  def __post_init__(self) -> None:
    check_codec("codec", self.codec, trees=True)
    check_int("small", self.small, 1)
    check_int("most", self.most, 1)

  @property
  def has_state(self) -> bool:
    """Whether the codec of the arrays remembers anything between calls."""
    return self.codec.has_state

  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[LeafGroup]:
    """Keeps large arrays and joins small ones."""
    parts = []
    joined: dict[tuple, list[list[int]]] = {}
    sizes: dict[tuple, int] = {}
    for part in self.codec.leaf_groups(leaves):
      size = sum(math.prod(leaves[i][1].shape) for i in part.leaves)
      if size > self.small:
        parts.append(part)
        continue
      kind = (part.codec, leaves[part.leaves[0]][1].dtype)
      if kind not in joined or sizes[kind] + size > self.most:
        joined.setdefault(kind, []).append([])
        sizes[kind] = 0
      joined[kind][-1].extend(part.leaves)
      sizes[kind] += size
    for (codec, _), groups in joined.items():
      parts.extend(LeafGroup(tuple(group), codec) for group in groups)
    return parts
