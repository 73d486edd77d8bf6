"""Choice of a codec for every leaf of an optimizer's state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import check_codec
from jaxmotion.core import PathRules, check_int, check_sequence, leaf_path

# Fields in which optax keeps averages of gradients, and of their squares.
FIRST_MOMENT_FIELDS = ("mu", "trace", "ema")
SECOND_MOMENT_FIELDS = ("nu",)
_MOMENT_FIELDS = FIRST_MOMENT_FIELDS + SECOND_MOMENT_FIELDS


class MomentCodecs:
  """Gives every leaf a codec, by rule or by the field that holds the leaf.

  Args:
    first: codec of first moments, or None.
    second: codec of second moments, or None.
    rules: pairs of a pattern and a codec (or None), which win over fields.
    min_leaf_size: number of elements. Leaves of fewer get no codec.

  Raises:
    TypeError: a codec is not one of arrays, or a rule is not such a pair.
    ValueError: a codec has state, or a pattern is not a regular expression.
  """

  def __init__(
    self,
    first: Codec | None,
    second: Codec | None,
    rules: Sequence[tuple[str, Codec | None]],
    min_leaf_size: int,
  ) -> None:
    check_sequence("rules", rules, "pairs of a pattern and a codec")
    self._rules = PathRules(rules, value="codec")
    named = [("first", first), ("second", second)]
    named += [("rules", codec) for _, codec in self._rules]
    for name, codec in named:
      if codec is not None:
        check_codec(name, codec, stateless=True)
    check_int("min_leaf_size", min_leaf_size, 0)
    self._first, self._second = first, second
    self._min_leaf_size = max(min_leaf_size, 1)

  def choose_codecs(
    self, leaves: Sequence[tuple[Any, Any]]
  ) -> list[Codec | None]:
    """Returns the codec of every leaf, None for leaves that stay as they are.

    Args:
      leaves: (key path, array) of every leaf of a state.

    Raises:
      ValueError: a rule matches no leaf, or there are leaves to encode and
        neither a rule nor a field name selects any.
    """
    paths = [path for path, x in leaves if _is_encodable(x)]
    names = [leaf_path(path) for path in paths]
    self._rules.require_use(names, "floating-point leaf of the state")
    if names and not any(self._is_known(path) for path in paths):
      raise ValueError(
        f"`tx` must keep state in a field named {', '.join(_MOMENT_FIELDS)}, "
        f"or `rules` must match some, got {names}."
      )
    return [
      self._leaf_codec(path)
      if _is_encodable(x) and x.size >= self._min_leaf_size
      else None
      for path, x in leaves
    ]

  def _is_known(self, path: Any) -> bool:
    has_rule = self._rules.first_match(leaf_path(path)) is not None
    return has_rule or _moment_field(path) is not None

  def _leaf_codec(self, path: Any) -> Codec | None:
    match = self._rules.first_match(leaf_path(path))
    if match is not None:
      return match.value
    field = _moment_field(path)
    if field is None:
      return None
    return self._first if field in FIRST_MOMENT_FIELDS else self._second


def _moment_field(path: Any) -> str | None:
  """Returns the outermost moment field of a path, or None.

  The outermost, because a parameter may be an attribute of such a name as well.
  """
  for key in path:
    if isinstance(key, jax.tree_util.GetAttrKey) and key.name in _MOMENT_FIELDS:
      return key.name
  return None


def _is_encodable(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0
