"""Choice of a codec for every leaf of an optimizer's state."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import check_codec

# Fields in which optax keeps averages of gradients, averages of their squares,
# and sums of their squares, by the argument that has their codec.
_FIELDS = {
  "first": ("mu", "trace", "ema"),
  "second": ("nu", "v_row", "v_col"),
  "sums": ("sum_of_squares",),
}
_KIND_OF = {name: kind for kind, names in _FIELDS.items() for name in names}


class MomentCodecs:
  """Gives every leaf a codec, by rule or by the field that holds the leaf.

  Args:
    codecs: codec or None of each kind of moments, "first", "second", "sums".
    rules: pairs of a pattern and a codec (or None), which win over fields.
    min_leaf_size: number of elements. Leaves of fewer get no codec.

  Raises:
    TypeError: a codec is not one of arrays, or a rule is not such a pair.
    ValueError: a codec has state, or a pattern is not a regular expression.
  """

  def __init__(
    self,
    codecs: Mapping[str, Codec | None],
    rules: Sequence[tuple[str, Codec | None]],
    min_leaf_size: int,
  ) -> None:
    core.check_sequence("rules", rules, "pairs of a pattern and a codec")
    self._rules = core.PathRules(rules, value="codec")
    named = [*codecs.items()]
    named += [("rules", codec) for _, codec in self._rules]
    for name, codec in named:
      if codec is not None:
        check_codec(name, codec, stateless=True)
    core.check_int("min_leaf_size", min_leaf_size, 0)
    self._codecs = codecs
    self._min_leaf_size = max(min_leaf_size, 1)

  def choose_codecs(
    self, leaves: Sequence[tuple[Any, Any]]
  ) -> list[Codec | None]:
    """Returns the codec of every leaf, None for leaves that stay as they
    are."""
    paths = [path for path, x in leaves if _is_encodable(x)]
    names = [core.leaf_path(path) for path in paths]
    self._rules.require_use(names, "floating-point leaf of the state")
    factored = _find_factored(paths)
    kinds = [_moment_kind(path, factored) for path in paths]
    if names and not any(kinds) and not any(map(self._has_rule, names)):
      raise ValueError(
        f"`tx` must keep state in a field named {', '.join(_KIND_OF)}, "
        f"or `rules` must match some, got {names}."
      )
    return [
      self._leaf_codec(path, factored)
      if _is_encodable(x) and x.size >= self._min_leaf_size
      else None
      for path, x in leaves
    ]

  def _has_rule(self, name: str) -> bool:
    return self._rules.first_match(name) is not None

  def _leaf_codec(self, path: Any, factored: Set[Any]) -> Codec | None:
    match = self._rules.first_match(core.leaf_path(path))
    if match is not None:
      return match.value
    kind = _moment_kind(path, factored)
    return None if kind is None else self._codecs[kind]


def _find_factored(paths: Sequence[Any]) -> Set[Any]:
  """Returns the paths of states of Adafactor, which have the field `v_row`."""
  return {
    path[:i]
    for path in paths
    for i, key in enumerate(path)
    if _field_name(key) == "v_row"
  }


def _moment_kind(path: Any, factored: Set[Any]) -> str | None:
  """Returns the kind of the outermost moment field of a path, or None."""
  # The outermost, because a parameter may be an attribute of such a name as
  # well. `v` is a second moment in a state of Adafactor. Other optimizers keep
  # averages with signs in fields of that name.
  for i, key in enumerate(path):
    name = _field_name(key)
    if name in _KIND_OF:
      return _KIND_OF[name]
    if name == "v" and path[:i] in factored:
      return "second"
  return None


def _field_name(key: Any) -> str:
  """Returns the name of a field; "" for a key or a position."""
  return key.name if isinstance(key, jax.tree_util.GetAttrKey) else ""


def _is_encodable(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 0
