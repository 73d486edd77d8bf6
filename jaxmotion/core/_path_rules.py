"""Ordered rules: the first pattern that matches a leaf's path decides."""

import contextlib
import contextvars
import re
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")

_may_be_unused: contextvars.ContextVar[bool] = contextvars.ContextVar(
  "may_be_unused", default=False
)


@contextlib.contextmanager
def allow_unused_rules() -> Iterator[None]:
  """Lets `PathRules.require_use` pass: a part of a tree need not use all rules.

  Example:
    >>> with allow_unused_rules():
    ...   PathRules([("bias", 32)]).require_use(["kernel"])
  """
  token = _may_be_unused.set(True)
  try:
    yield
  finally:
    _may_be_unused.reset(token)


class Match(NamedTuple, Generic[Value]):
  """The first rule that matches a path.

  Attributes:
    rule: position of the rule.
    found: where in the path the pattern matches.
    value: the thing that the rule pairs with its pattern.
  """

  rule: int
  found: re.Match[str]
  value: Value


class PathRules(Generic[Value]):
  """Pairs of a regular expression and a value, tried in order on a path.

  A pattern matches a path if it is found anywhere in it (`re.search`). Paths
  are those of `leaf_path`.

  Args:
    rules: pairs of a pattern and a value.
    name: name of the caller's argument, for messages.
    value: noun for the paired values, for messages.

  Raises:
    TypeError: a rule is not such a pair.
    ValueError: a pattern is not a regular expression.

  Example:
    >>> rules = PathRules([("bias", 32), (".*", 8)])
    >>> [rules.first_match(path).value for path in ("a/bias", "a/kernel")]
    [32, 8]
  """

  def __init__(
    self,
    rules: Iterable[tuple[str, Value]],
    name: str = "rules",
    value: str = "value",
  ):
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
      if found := pattern.search(path):
        return Match(index, found, value)
    return None

  def require_match(self, path: str, default: str) -> Match[Value]:
    """Returns the first rule that matches the path.

    Args:
      path: of a leaf.
      default: the rule to end with, for the message.

    Raises:
      ValueError: no rule matches.
    """
    if match := self.first_match(path):
      return match
    patterns = ", ".join(repr(pattern) for pattern, _ in self)
    raise ValueError(
      f"`{self._name}` must cover every leaf, got {path!r}, which matches none "
      f"of {patterns}: end with {default}."
    )

  def require_use(self, paths: Iterable[str], leaf: str = "leaf") -> None:
    """Raises unless every pattern matches one of the paths at least.

    Args:
      paths: of all leaves.
      leaf: noun for what has a path, for the message.

    Raises:
      ValueError: a pattern matches no path.
    """
    if _may_be_unused.get():
      return
    every: list[Any] = list(paths)
    for pattern, _ in self._pairs:
      if not any(pattern.search(path) for path in every):
        listed = ", ".join(map(repr, every))
        raise ValueError(
          f"`{self._name}` must match a {leaf} each, got {pattern.pattern!r}, "
          f"which matches none of {listed or f'no {leaf}'}."
        )
