"""Ordered rules: the first pattern that matches a leaf's path decides."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Match(NamedTuple, Generic[Value]):
  """Describes the first rule that matches a path.

  Attributes:
    rule: position of the rule.
    found: where in the path the pattern matches.
    value: the thing that the rule pairs with its pattern.
  """

  rule: int
  found: re.Match[str]
  value: Value


class PathRules(Generic[Value]):
  """Pairs regular expressions with values and tries them in order on a path."""

  def __init__(
    self,
    rules: Iterable[tuple[str, Value]],
    name: str = "rules",
    value: str = "value",
  ):
    # name: the caller's argument; value: noun for its values.
    self._name = name
    self._pairs: list[tuple[re.Pattern[str], Value]] = []
    for rule in rules:
      if (
        not isinstance(rule, tuple | list)
        or len(rule) != 2
        or not isinstance(rule[0], str)
      ):
        raise TypeError(
          f"`{name}` must be pairs of a pattern and a {value}, got {rule!r}."
        )
      try:
        self._pairs.append((re.compile(rule[0]), rule[1]))
      except re.error as e:
        raise ValueError(
          f"`{name}` must have regular expressions, got {rule[0]!r} ({e})."
        ) from e

  def __iter__(self) -> Iterator[tuple[str, Value]]:
    return ((pattern.pattern, value) for pattern, value in self._pairs)

  def first_match(self, path: str) -> Match[Value] | None:
    """Returns the first rule that matches the path, or None."""
    for index, (pattern, value) in enumerate(self._pairs):
      # A pattern matches anywhere in a path, which is one of `leaf_path`.
      if found := pattern.search(path):
        return Match(index, found, value)
    return None

  def require_match(self, path: str, default: str) -> Match[Value]:
    """Returns the first rule that matches the path, or raises."""
    # default: the rule to end with, for the message.
    if match := self.first_match(path):
      return match
    patterns = ", ".join(repr(pattern) for pattern, _ in self)
    raise ValueError(
      f"`{self._name}` must cover every leaf, got {path!r}, which matches none "
      f"of {patterns}: end with {default}."
    )

  def require_use(self, paths: Iterable[str], leaf: str = "leaf") -> None:
    """Raises unless every pattern matches one of the paths at least."""
    # leaf: noun for what has a path, for the message.
    every: list[Any] = list(paths)
    for pattern, _ in self._pairs:
      if not any(pattern.search(path) for path in every):
        listed = ", ".join(map(repr, every))
        raise ValueError(
          f"`{self._name}` must match a {leaf} each, got {pattern.pattern!r}, "
          f"which matches none of {listed or f'no {leaf}'}."
        )
