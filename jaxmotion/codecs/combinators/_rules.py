"""The codec `rules`, which chooses a codec for each leaf by its path."""

import dataclasses
from collections.abc import Sequence

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws, _partition
from jaxmotion.core import ShapedLike


@dataclasses.dataclass(frozen=True)
class rules(_partition.TreeCodec):
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

  rules: tuple[tuple[str, _codec.Codec], ...]

  def __post_init__(self) -> None:
    rules = core.check_sequence(
      "rules", self.rules, "pairs of pattern and codec"
    )
    for rule in rules:
      core.check_sequence("rules", rule, "pairs of pattern and codec")
    pairs = tuple(tuple(rule) for rule in rules)
    object.__setattr__(self, "rules", pairs)
    if not pairs:
      raise ValueError("`rules` must hold at least one rule, got none.")
    for pattern, codec in self._path_rules():
      if not isinstance(codec, _codec.Codec):
        raise TypeError(
          "`rules` must be pairs of a pattern and a codec, got "
          f"{(pattern, codec)!r}."
        )

  @property
  def laws(self) -> _laws.Laws:
    """The laws that all codecs of the rules state."""
    return _laws.weakest_laws([codec.laws for _, codec in self.rules])

  @property
  def has_state(self) -> bool:
    """Whether a codec of the rules remembers anything between calls."""
    return any(codec.has_state for _, codec in self.rules)

  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[_codec.LeafGroup]:
    """Returns the leaves with the codec of the first rule that matches."""
    _codec.check_leaves(leaves)
    rules = self._path_rules()
    paths = [path for path, _ in leaves]
    claimed: dict[int, list[int]] = {i: [] for i in range(len(self.rules))}
    for leaf, path in enumerate(paths):
      claimed[rules.require_match(path, "('.*', codec)").rule].append(leaf)
    groups = []
    for positions, (_, codec) in zip(claimed.values(), self.rules, strict=True):
      for inner, own_codec in codec.leaf_groups([leaves[i] for i in positions]):
        own = tuple(positions[i] for i in inner)
        groups.append(_codec.LeafGroup(own, own_codec))
    return groups

  def _check_paths(self, paths: Sequence[str]) -> None:
    """Raises for a rule that matches none of the paths."""
    if not paths:
      return  # In a tree without leaves no rule can be misspelt.
    rules = self._path_rules()
    rules.require_use(paths)
    claimed: dict[int, list[str]] = {}
    for path in paths:
      if match := rules.first_match(path):
        claimed.setdefault(match.rule, []).append(path)
    for rule, own in claimed.items():
      self.rules[rule][1]._check_paths(own)

  def _path_rules(self) -> core.PathRules[_codec.Codec]:
    return core.PathRules(self.rules, value="codec")
