"""Argument checks; errors name the argument, its condition and its value.

Each is one line at the top of a public function, `check_int("bits", bits, 1)`.
The name is for the message alone, in which `noun` says what is allowed. No bool
is a number, and no tracer is a plain Python value. Elements of sequences and
mappings are checked one by one as `sizes[0]`, `measured['copy']`. Codecs are
checked by `codecs.extend.check_codec`.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.core import _tree


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
  """Raises unless `value` is an int in [low, high]."""
  # Only plain Python values: the repr and the config of a codec print them.
  is_int = type(value) is int
  if is_int and low <= value and (high is None or value <= high):
    return
  span = f"in [{low}, {high}]" if high is not None else f">= {low}"
  raise (ValueError if is_int else TypeError)(
    f"`{name}` must be an integer {span}, got {_describe_number(value)}"
  )


def check_number(
  name: str,
  value: Any,
  low: float = -math.inf,
  high: float = math.inf,
  *,
  open_low: bool = False,
  open_high: bool = False,
) -> None:
  """Raises unless `value` is a finite number of an interval."""
  # No number reaches an infinite bound.
  open_low = open_low or math.isinf(low)
  open_high = open_high or math.isinf(high)
  # Only plain Python values: the repr and the config of a codec print them.
  is_number = type(value) in (int, float)
  if is_number:
    above = low < value or (value == low and not open_low)
    below = value < high or (value == high and not open_high)
    if above and below:
      return
  left, right = "(" if open_low else "[", ")" if open_high else "]"
  raise (ValueError if is_number else TypeError)(
    f"`{name}` must be a number in {left}{low:g}, {high:g}{right}, got "
    f"{_describe_number(value)}"
  )


def _describe_number(value: Any) -> str:
  """Describes what is no allowed number, and where an array may come from."""
  if not isinstance(value, jax.Array):
    return f"{value!r}."
  return (
    f"an array, {shape_string(value)}: write a Python number. "
    "optax.inject_hyperparams makes arrays of all numbers but those of its "
    "`static_args`."
  )


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
  """Raises unless `value` is one of `choices`."""
  for choice in choices:
    if type(value) is type(choice) and value == choice:
      return
  names = ", ".join(map(repr, choices))
  raise ValueError(f"`{name}` must be one of {names}, got {value!r}.")


def check_bool(name: str, value: Any) -> None:
  """Raises unless `value` is True or False."""
  if type(value) is not bool:
    raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def check_text(name: str, value: Any) -> None:
  """Raises unless `value` is a string."""
  if not isinstance(value, str):
    raise TypeError(f"`{name}` must be a string, got {value!r}.")


def check_instance(
  name: str, value: Any, kind: type | tuple[type, ...], noun: str
) -> None:
  """Raises unless `value` is an object of a class."""
  if not isinstance(value, kind):
    raise TypeError(f"`{name}` must be {noun}, got {value!r:.300}.")


def check_sequence(name: str, value: Any, noun: str) -> tuple[Any, ...]:
  """Returns the elements of a list or a tuple, or raises."""
  if not isinstance(value, Sequence) or isinstance(value, str | bytes):
    raise TypeError(
      f"`{name}` must be a list or tuple of {noun}, got {value!r:.300}."
    )
  return tuple(value)


def check_mapping(name: str, value: Any, noun: str) -> dict[Any, Any]:
  """Returns a mapping as a dict, or raises."""
  if not isinstance(value, Mapping) or not all(
    isinstance(key, str) for key in value
  ):
    raise TypeError(f"`{name}` must be a dict of {noun}, got {value!r:.300}.")
  return dict(value)


def check_float(name: str, x: Any) -> None:
  """Raises unless `x` has a floating-point dtype."""
  shaped = hasattr(x, "shape") and hasattr(x, "dtype")
  if not shaped or not jnp.issubdtype(x.dtype, jnp.floating):
    found = shape_string(x) if shaped else f"{x!r:.200}"
    raise TypeError(f"`{name}` must be a floating-point array, got {found}.")


def check_callable(name: str, value: Any) -> None:
  """Raises unless `value` can be called."""
  if not callable(value):
    raise TypeError(f"`{name}` must be a function, got {value!r}.")


def check_arrays(
  name: str, tree: _tree.PyTree, *, numbers: bool = True
) -> None:
  """Raises unless every leaf of a tree is an array, a number or a shape."""
  # numbers: whether Python numbers, which have no dtype, are allowed.
  for x in jax.tree.leaves(tree):
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
      continue
    if not is_array(x) or not (numbers or hasattr(x, "dtype")):
      named = _tree.named_leaves(tree)
      place = next(f" at {p!r}" if p else "" for p, y in named if y is x)
      raise TypeError(
        f"`{name}` must be a tree of arrays, got {x!r:.200}{place}."
      )


def check_like(
  name: str, tree: _tree.PyTree, like: _tree.PyTree, source: str
) -> None:
  """Raises unless a tree of arrays has the structure and shapes of another."""
  # source: where a right tree comes from, for the message.
  check_arrays(name, tree)
  if not _tree.same_structure(tree, like):
    raise ValueError(
      f"`{name}` must be like that of {source}, got "
      f"{jax.tree.structure(tree)}, not {jax.tree.structure(like)}."
    )
  for (path, x), y in zip(
    _tree.named_leaves(tree), jax.tree.leaves(like), strict=True
  ):
    if jnp.shape(x) != jnp.shape(y):
      place = f" at {path!r}" if path else ""
      raise ValueError(
        f"`{name}` must be like that of {source}, got {shape_strings(x)}"
        f"{place}, not {shape_strings(y)}."
      )


def is_array(x: Any) -> bool:
  """Says whether JAX can compute with a leaf, or its type with a shape."""
  if isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray):
    return True
  try:
    jax.typeof(x)
  except (OverflowError, TypeError, ValueError):
    return False
  return True


def shape_string(x: Any) -> str:
  """Returns dtype and shape as JAX prints them, such as `float32[2,3]`."""
  return jax.core.ShapedArray(x.shape, x.dtype).str_short()


def shape_strings(tree: _tree.PyTree) -> str:
  """Returns dtypes and shapes of all leaves, for messages."""
  likes = [
    jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
    for a in jax.tree.leaves(tree)
  ]
  return ", ".join(map(shape_string, likes)) if likes else "no arrays"


def same_shapes(tree: _tree.PyTree, like: _tree.PyTree) -> bool:
  """Returns whether trees have one structure, and leaves like the other's."""
  # tree: arrays, or numbers; like: arrays, or ShapeDtypeStructs.
  return _tree.same_structure(tree, like) and all(
    jnp.shape(a) == b.shape and jnp.result_type(a) == b.dtype
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
  )


def check_buffers(
  args: Mapping[str, _tree.PyTree], donated: Collection[str] = ()
) -> None:
  """Raises unless every array exists and every donated one is given once."""
  # On several devices of one process, XLA:CPU ends the process where it should
  # raise. So the check comes before the call.
  owners: dict[int, str] = {}
  for name, tree in args.items():
    for leaf in jax.tree.leaves(tree):
      kind: Any = type(leaf)
      if not _has_buffer(kind):
        continue
      if leaf.is_deleted():
        raise ValueError(
          f"`{_find_places(args, leaf)[0]}` must be an array that still "
          "exists, got one whose buffer was donated to an earlier call: go on "
          "with what that call returned, copy before it (`jnp.copy`), or make "
          "a step that does not donate."
        )
      if id(leaf) not in owners:
        owners[id(leaf)] = name
        continue
      owner = owners[id(leaf)]
      if owner in donated or name in donated:
        first, second, *_ = _find_places(args, leaf)
        raise ValueError(
          f"`{second}` must be an array of its own, because "
          f"`{owner if owner in donated else name}` is donated, got the array "
          f"of `{first}`: copy one of them with `jnp.copy`."
        )


@functools.cache
def _has_buffer(kind: type) -> bool:
  """Returns whether leaves of this type are arrays of JAX and no tracers."""
  # By type, because `isinstance(leaf, jax.Array)` costs more than the rest of
  # the check, which every step makes.
  return hasattr(kind, "is_deleted") and not issubclass(kind, jax.core.Tracer)


def _find_places(
  args: Mapping[str, _tree.PyTree], leaf: jax.Array
) -> list[str]:
  """Names every place, argument and path, where an array is given."""
  return [
    f"{name}/{path}" if path else name
    for name, tree in args.items()
    for path, other in _tree.named_leaves(tree)
    if other is leaf
  ]
