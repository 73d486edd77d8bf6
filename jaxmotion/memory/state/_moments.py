"""Which leaves of an optimiser's state are encoded, and by what."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec
from jaxmotion.core import check_int, leaf_path

# Fields in which optax keeps averages of gradients, and of their squares.
FIRST = ("mu", "trace", "ema")
SECOND = ("nu",)


@dataclasses.dataclass(frozen=True)
class Moments:
  """Gives leaves a codec, by rule or by the field that they are in.

  Attributes:
    first: codec of first moments.
    second: codec of second moments.
    rules: pairs of a pattern and a codec, which go before.
    min_leaf_size: leaves of fewer values get none.
  """

  first: Codec | None
  second: Codec | None
  rules: tuple[tuple[str, Codec | None], ...]
  min_leaf_size: int

  def __post_init__(self) -> None:
    _check_codec("first", self.first)
    _check_codec("second", self.second)
    check_int("min_leaf_size", self.min_leaf_size, 0)
    for rule in self.rules:
      if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise TypeError(
          f"`rules` must be pairs of a pattern and a codec, got {rule!r}."
        )
      _check_pattern(rule[0])
      _check_codec("rules", rule[1])

  def codecs(self, leaves: Sequence[tuple[Any, Any]]) -> list[Codec | None]:
    """Returns the codec of every leaf, None for those that stay.

    Args:
      leaves: (key path, array) of every leaf of a state.

    Raises:
      ValueError: a rule matches none of them, or there are some to encode and
        none is known.
    """
    paths = [path for path, x in leaves if _can(x)]
    names = [leaf_path(path) for path in paths]
    for pattern, _ in self.rules:
      if not any(re.search(pattern, name) for name in names):
        raise ValueError(
          f"`rules` must match a floating-point leaf of the state each, got "
          f"{pattern!r}, which matches none of {names}."
        )
    if names and not any(self._is_known(path) for path in paths):
      raise ValueError(
        f"`tx` must keep state in a field named {', '.join(FIRST + SECOND)}, "
        f"or `rules` must match some, got {names}."
      )
    least = max(self.min_leaf_size, 1)
    return [
      self._codec(path) if _can(x) and x.size >= least else None
      for path, x in leaves
    ]

  def _is_known(self, path: Any) -> bool:
    return self._rule(path) is not None or _field(path) is not None

  def _codec(self, path: Any) -> Codec | None:
    rule = self._rule(path)
    if rule is not None:
      return rule[1]
    field = _field(path)
    if field is None:
      return None
    return self.first if field in FIRST else self.second

  def _rule(self, path: Any) -> tuple[str, Codec | None] | None:
    name = leaf_path(path)
    matching = (r for r in self.rules if re.search(r[0], name))
    return next(matching, None)


def _field(path: Any) -> str | None:
  """The outermost field of a known name: a parameter may have one as well."""
  for key in path:
    if isinstance(key, jax.tree_util.GetAttrKey) and key.name in FIRST + SECOND:
      return key.name
  return None


def _can(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0


def _check_pattern(pattern: Any) -> None:
  if not isinstance(pattern, str):
    raise TypeError(f"`rules` must have regular expressions, got {pattern!r}.")
  try:
    re.compile(pattern)
  except re.error as e:
    raise ValueError(
      f"`rules` must have regular expressions, got {pattern!r} ({e})."
    ) from e


def _check_codec(name: str, codec: Any) -> None:
  if codec is None:
    return
  if not isinstance(codec, Codec) or codec.is_tree:
    raise TypeError(
      f"`{name}` must be a codec of arrays or None, got {codec!r}."
    )
  like = jax.ShapeDtypeStruct((4096,), jnp.float32)
  if jax.tree.leaves(jax.eval_shape(codec.init, like)):
    raise ValueError(f"`{name}` must have no state, got {codec!r}.")
