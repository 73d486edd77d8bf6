"""Codecs of trees: they choose codecs for leaves, and join small leaves."""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxmotion import core
from jaxmotion.codecs import _bases, _checks, _codec, _laws
from jaxmotion.codecs._arrays import _floats
from jaxmotion.core import ShapedLike


class ChoiceCodec(_bases.TreeCodec):
  """Codec of trees that encodes every leaf with one of some codecs."""

  @abc.abstractmethod
  def _choices(self) -> Sequence[_codec.Codec]:
    """Returns all of the codecs."""

  @property
  def laws(self) -> _laws.Laws:
    """The laws that all of the codecs state."""
    return _laws.weakest_laws([codec.laws for codec in self._choices()])

  @property
  def has_state(self) -> bool:
    """Whether one of the codecs remembers anything between calls."""
    return any(codec.has_state for codec in self._choices())


@dataclasses.dataclass(frozen=True)
@core.declare(
  rules=core.sequence(
    "pairs of pattern and codec", core.sequence("a pattern and a codec")
  )
)
class rules(ChoiceCodec):
  """Chooses a codec for every leaf by the first pattern that matches its path.

  Properties: those of the codec that a leaf gets.

  Args:
    rules: pairs of a regular expression, searched for in the leaf's path, and a
      codec. The first that matches wins. A path has keys, attributes and
      positions between slashes, such as "layers/0/kernel", for dicts, modules
      and flax alike. The `value` of an `nnx.Variable` or `nn.Partitioned` is
      left out, so "kernel$" matches.

  Raises:
    TypeError: a rule is no pair of a string and a codec.
    ValueError: a pattern is no regular expression; when a tree is seen, a
      pattern matches no leaf or a leaf matches no pattern.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.rules(
    ...   [("bias", codecs.identity()), (".*", codecs.uniform(bits=8))]
    ... )
    >>> grads = {"bias": jnp.ones(3), "kernel": jnp.ones((2, 3))}
    >>> payload, _ = codec.encode(grads)
    >>> [type(p).__name__ for p in payload]
    ['Values', 'Symmetric']
  """

  rules: tuple[tuple[str, _codec.Codec], ...]

  def __post_init__(self) -> None:
    if not self.rules:
      raise ValueError("`rules` must hold at least one rule, got none.")
    for pattern, codec in self._path_rules():
      if not isinstance(codec, _codec.Codec):
        raise TypeError(
          "`rules` must be pairs of a pattern and a codec, got "
          f"{(pattern, codec)!r}."
        )

  def _choices(self) -> list[_codec.Codec]:
    return [codec for _, codec in self.rules]

  @core.declare(leaves=_checks.check_leaves)
  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[_codec.LeafGroup]:
    """Returns the leaves with the codec of the first rule that matches."""
    claimed = self._claim_paths([path for path, _ in leaves])
    groups = []
    for positions, codec in zip(claimed, self._choices(), strict=True):
      for group in codec.leaf_groups([leaves[i] for i in positions]):
        # From positions among the leaves of the rule to those among all.
        own = tuple(positions[i] for i in group.leaves)
        groups.append(group._replace(leaves=own))
    return groups

  def _check_paths(self, paths: Sequence[str]) -> None:
    """Raises for a rule that matches none of the paths."""
    if not paths:
      return  # In a tree without leaves no rule can be misspelt.
    self._path_rules().require_use(paths)
    claimed = self._claim_paths(paths)
    for positions, codec in zip(claimed, self._choices(), strict=True):
      codec._check_paths([paths[i] for i in positions])

  def _claim_paths(self, paths: Sequence[str]) -> list[list[int]]:
    """Returns the positions of the paths that each rule is the first for."""
    rules = self._path_rules()
    claimed: list[list[int]] = [[] for _ in self.rules]
    for i, path in enumerate(paths):
      claimed[rules.require_match(path, "('.*', codec)").rule].append(i)
    return claimed

  def _path_rules(self) -> core.PathRules[_codec.Codec]:
    return core.PathRules(self.rules, value="codec")


@dataclasses.dataclass(frozen=True)
@core.declare(
  codec=functools.partial(_codec.check_codec, trees=True),
  max_leaf_size=core.integer(1),
  max_bucket_size=core.integer(1),
)
class buckets(ChoiceCodec):
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
    >>> from jaxmotion import codecs
    >>> grads = {"a": jnp.ones(5), "b": jnp.ones(7), "c": jnp.ones(10_000)}
    >>> payload, _ = codecs.buckets(codecs.sign()).encode(grads)
    >>> len(payload)
    2
  """

  codec: _codec.Codec
  max_leaf_size: int = dataclasses.field(default=4096, kw_only=True)
  max_bucket_size: int = dataclasses.field(default=1 << 20, kw_only=True)

  def _choices(self) -> list[_codec.Codec]:
    return [self.codec]

  def _check_paths(self, paths: Sequence[str]) -> None:
    """Raises for a rule of the wrapped codec that matches none of the paths."""
    self.codec._check_paths(paths)

  @core.declare(leaves=_checks.check_leaves)
  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[_codec.LeafGroup]:
    """Keeps large arrays alone and joins small ones."""
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


@dataclasses.dataclass(frozen=True)
@core.declare(
  codec=_codec.check_codec,
  otherwise=_codec.check_codec,
  min_ratio=core.number(0, 1e9, open_low=True),
  min_size=core.integer(0),
  min_dimensions=core.integer(0, 32),
)
class where_smaller(ChoiceCodec):
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
    >>> from jaxmotion.codecs import low_rank
    >>> codec = where_smaller(low_rank(rank=1))
    >>> payload, _ = codec.encode({"b": jnp.ones(8), "w": jnp.ones((8, 8))},
    ...   codec.init({"b": jnp.ones(8), "w": jnp.ones((8, 8))}))
    >>> [type(p).__name__ for p in payload]
    ['Values', 'Factors']
  """

  codec: _codec.Codec
  otherwise: _codec.Codec = dataclasses.field(default_factory=_floats.identity)
  min_ratio: float = dataclasses.field(default=1.0, kw_only=True)
  min_size: int = dataclasses.field(default=0, kw_only=True)
  min_dimensions: int = dataclasses.field(default=0, kw_only=True)

  def _choices(self) -> list[_codec.Codec]:
    return [self.codec, self.otherwise]

  @core.declare(leaves=_checks.check_leaves)
  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[_codec.LeafGroup]:
    """Returns each leaf with the codec that its size decides."""
    return [
      _codec.LeafGroup((i,), self._choose_codec(like))
      for i, (_, like) in enumerate(leaves)
    ]

  def _choose_codec(self, like: ShapedLike) -> _codec.Codec:
    """Returns the codec of a leaf, by its payload's bytes and its size."""
    size = math.prod(like.shape)
    if size < self.min_size or len(like.shape) < self.min_dimensions:
      return self.otherwise
    payload = core.tree_bytes(self.codec.payload_like(like)) * self.min_ratio
    return (
      self.codec if payload < size * like.dtype.itemsize else self.otherwise
    )
