"""The codec `buckets`, which joins small leaves into few arrays."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws, _partition
from jaxmotion.core import ShapedLike


@dataclasses.dataclass(frozen=True)
class buckets(_partition.TreeCodec):
  """Concatenates small leaves of one dtype and codec before encoding them.

  A leaf of a few elements pays for scales and padding of its own; joined leaves
  pay once. Large leaves stay alone: concatenating them would cost a copy and
  gain nothing (all payloads are sent in one buffer in any case).

  Properties: those of the codec that encodes an array; a block may span leaves.

  Args:
    codec: encodes the arrays; may itself be `rules`.
    max_leaf_size: leaves of at most this many elements are concatenated.
    max_bucket_size: maximum number of elements in one bucket.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> grads = {"a": jnp.ones(5), "b": jnp.ones(7), "c": jnp.ones(10_000)}
    >>> payload, _ = codecs.buckets(codecs.sign()).encode(grads)
    >>> len(payload)
    2
  """

  codec: _codec.Codec
  max_leaf_size: int = dataclasses.field(default=4096, kw_only=True)
  max_bucket_size: int = dataclasses.field(default=1 << 20, kw_only=True)

  def __post_init__(self) -> None:
    _codec.check_codec("codec", self.codec, trees=True)
    core.check_int("max_leaf_size", self.max_leaf_size, 1)
    core.check_int("max_bucket_size", self.max_bucket_size, 1)

  @property
  def laws(self) -> _laws.Laws:
    """The laws of the codec that encodes the arrays."""
    return self.codec.laws

  @property
  def has_state(self) -> bool:
    """Whether the codec of the arrays remembers anything between calls."""
    return self.codec.has_state

  def _check_paths(self, paths: Sequence[str]) -> None:
    """Raises for a rule of the wrapped codec that matches none of the paths."""
    self.codec._check_paths(paths)

  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[_codec.LeafGroup]:
    """Keeps large arrays alone and joins small ones."""
    _codec.check_leaves(leaves)
    alone = []
    joined: dict[tuple[Any, ...], list[list[int]]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for group in self.codec.leaf_groups(leaves):
      size = sum(math.prod(leaves[i][1].shape) for i in group.leaves)
      if size > self.max_leaf_size:
        alone.append(group)
        continue
      kind = (group.codec, leaves[group.leaves[0]][1].dtype)
      if kind not in joined or sizes[kind] + size > self.max_bucket_size:
        joined.setdefault(kind, []).append([])
        sizes[kind] = 0
      joined[kind][-1].extend(group.leaves)
      sizes[kind] += size
    joined_groups = [
      _codec.LeafGroup(tuple(positions), codec)
      for (codec, _), of_kind in joined.items()
      for positions in of_kind
    ]
    return alone + joined_groups
