"""A codec for each leaf by its path."""

import dataclasses
import re
from collections.abc import Sequence

from jaxmotion.codecs._codec import Codec, LeafGroup
from jaxmotion.codecs._partition import TreeCodec
from jaxmotion.core import ShapedLike


@dataclasses.dataclass(frozen=True)
class rules(TreeCodec):
  """Chooses a codec for every leaf by the first pattern that matches its path.

  Laws: those of the codec that a leaf gets.

  Args:
    rules: pairs of a regular expression, searched for in the leaf's path
      ("dense/kernel"), and a codec. The first that matches wins.

  Raises:
    TypeError: a rule is no pair of a string and a codec.
    ValueError: a pattern is no regular expression; when a tree is seen, a
      pattern matches no leaf or a leaf matches no pattern.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> codec = codecs.rules(
    ...   [("bias", codecs.identity()), (".*", codecs.uniform(bits=8))]
    ... )
    >>> grads = {"bias": jnp.ones(3), "kernel": jnp.ones((2, 3))}
    >>> payload, _ = codec.encode(grads)
    >>> [type(p).__name__ for p in payload]
    ['Values', 'Symmetric']
  """

  rules: tuple[tuple[str, Codec], ...]

  def __post_init__(self) -> None:
    pairs = tuple(tuple(rule) for rule in self.rules)
    object.__setattr__(self, "rules", pairs)
    if not pairs:
      raise ValueError("`rules` must hold at least one rule, got none.")
    for pair in pairs:
      if (
        len(pair) != 2
        or not isinstance(pair[0], str)
        or not isinstance(pair[1], Codec)
      ):
        raise TypeError(
          f"`rules` must be pairs of a pattern and a codec, got {pair!r}."
        )
      try:
        re.compile(pair[0])
      except re.error as e:
        raise ValueError(
          f"`rules` must have regular expressions, got {pair[0]!r} ({e})."
        ) from e

  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[LeafGroup]:
    """Gives every leaf to its codec."""
    claimed: list[list[int]] = [[] for _ in self.rules]
    for i, (path, _) in enumerate(leaves):
      claimed[self._rule_of(path)].append(i)
    parts = []
    for (pattern, codec), positions in zip(self.rules, claimed, strict=True):
      if not any(re.search(pattern, path) for path, _ in leaves):
        names = ", ".join(repr(path) for path, _ in leaves)
        raise ValueError(
          f"`rules` must match a leaf each, got {pattern!r}, which matches "
          f"none of {names or 'no leaves'}."
        )
      for leaf_positions, part_codec in codec.leaf_groups(
        [leaves[i] for i in positions]
      ):
        own = tuple(positions[i] for i in leaf_positions)
        parts.append(LeafGroup(own, part_codec))
    return parts

  def _rule_of(self, path: str) -> int:
    for i, (pattern, _) in enumerate(self.rules):
      if re.search(pattern, path):
        return i
    patterns = ", ".join(repr(p) for p, _ in self.rules)
    raise ValueError(
      f"`rules` must cover every leaf, got {path!r}, which matches none of "
      f"{patterns}: end with ('.*', codec)."
    )
