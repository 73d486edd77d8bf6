"""Argument checks; errors name the argument, its condition and its value.

Each is one line at the top of a public function, `check_int("bits", bits, 1)`:

- `check_int`, `check_number`, `check_bool`, `check_text`, `check_choice`: plain
  Python values; no bool is a number, no tracer is any of them;
- `check_axis_name`: names of mesh axes;
- `check_callable`, `check_instance`: functions, objects of a class;
- `check_sequence`, `check_mapping`: lists and tuples, dicts; their elements
  are checked one by one as `sizes[0]`, `measured['copy']`;
- `check_float`, `check_arrays`, `check_like`: one array, a tree of arrays, a
  tree that has to fit another one.

`codecs.extend.check_codec` checks codecs.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.core import _tree, _types

_AVAL = type(jax.typeof(0.0))


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
  """Raises unless `value` is an int in [low, high].

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.
    low: smallest value allowed.
    high: largest value allowed, or None for no limit.

  Raises:
    TypeError: not an integer.
    ValueError: outside the range.

  >>> check_int("bits", 9, 1, 8)
  Traceback (most recent call last):
  ...
  ValueError: `bits` must be an integer in [1, 8], got 9.
  """
  span = f"in [{low}, {high}]" if high is not None else f">= {low}"
  message = f"`{name}` must be an integer {span}, got {_describe_number(value)}"
  # Only plain Python values: the repr and the config of a codec print them.
  if type(value) is not int:
    raise TypeError(message)
  if value < low or (high is not None and value > high):
    raise ValueError(message)


def check_number(
  name: str,
  value: Any,
  low: float = -math.inf,
  high: float = math.inf,
  *,
  open_low: bool = False,
  open_high: bool = False,
) -> None:
  """Raises unless `value` is a finite number of an interval.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.
    low: smallest number allowed.
    high: largest number allowed.
    open_low: whether `low` itself is refused; an infinite one always is.
    open_high: whether `high` itself is refused; an infinite one always is.

  Raises:
    TypeError: not an int or a float.
    ValueError: outside the interval, or NaN.

  >>> check_number("density", 0, 0, 1, open_low=True)
  Traceback (most recent call last):
  ...
  ValueError: `density` must be a number in (0, 1], got 0.
  """
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
  """Raises unless `value` is one of `choices`.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.
    choices: values that it may have.

  Raises:
    ValueError: the value is none of the choices.

  >>> check_choice("rounding", "up", ("nearest", "stochastic"))
  Traceback (most recent call last):
  ...
  ValueError: `rounding` must be one of 'nearest', 'stochastic', got 'up'.
  """
  if not any(type(value) is type(c) and value == c for c in choices):
    names = ", ".join(map(repr, choices))
    raise ValueError(f"`{name}` must be one of {names}, got {value!r}.")


def check_bool(name: str, value: Any) -> None:
  """Raises unless `value` is True or False.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.

  Raises:
    TypeError: it is anything else, such as 1 or a tracer.

  >>> check_bool("overlap", 1)
  Traceback (most recent call last):
  ...
  TypeError: `overlap` must be True or False, got 1.
  """
  if type(value) is not bool:
    raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def check_text(name: str, value: Any) -> None:
  """Raises unless `value` is a string.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.

  Raises:
    TypeError: it is no string.

  >>> check_text("name", None)
  Traceback (most recent call last):
  ...
  TypeError: `name` must be a string, got None.
  """
  if not isinstance(value, str):
    raise TypeError(f"`{name}` must be a string, got {value!r}.")


def check_axis_name(name: str, value: Any) -> None:
  """Raises unless `value` names a mesh axis, or several as a tuple.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.

  Raises:
    TypeError: it is no string and no tuple of strings.
    ValueError: it is an empty tuple, or has a name twice.

  >>> check_axis_name("axis_name", ("host", 1))
  Traceback (most recent call last):
  ...
  TypeError: `axis_name` must be the name of a mesh axis or a tuple of names, \
got ('host', 1).
  """
  message = (
    f"`{name}` must be the name of a mesh axis or a tuple of names, got "
    f"{value!r}."
  )
  names = value if isinstance(value, tuple) else (value,)
  if not all(isinstance(axis, str) for axis in names):
    raise TypeError(message)
  if not names or len(set(names)) < len(names):
    raise ValueError(message)


def check_instance(
  name: str, value: Any, kind: type | tuple[type, ...], noun: str
) -> None:
  """Raises unless `value` is an object of a class.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.
    kind: class, or several that are allowed.
    noun: what the value must be, for the message ("a Key or None").

  Raises:
    TypeError: it is an object of another class.

  >>> check_instance("groups", [1], dict, "a dict of groups")
  Traceback (most recent call last):
  ...
  TypeError: `groups` must be a dict of groups, got [1].
  """
  if not isinstance(value, kind):
    raise TypeError(f"`{name}` must be {noun}, got {value!r:.300}.")


def check_sequence(name: str, value: Any, noun: str) -> tuple[Any, ...]:
  """Returns the elements of a list or a tuple, or raises.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.
    noun: what the elements must be, for the message ("codecs").

  Raises:
    TypeError: it is no sequence, or a string.

  >>> check_sequence("sizes", 3, "numbers")
  Traceback (most recent call last):
  ...
  TypeError: `sizes` must be a list or tuple of numbers, got 3.
  """
  if not isinstance(value, Sequence) or isinstance(value, str | bytes):
    raise TypeError(
      f"`{name}` must be a list or tuple of {noun}, got {value!r:.300}."
    )
  return tuple(value)


def check_mapping(name: str, value: Any, noun: str) -> dict[Any, Any]:
  """Returns a mapping as a dict, or raises.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.
    noun: what it maps, for the message ("dtypes to rates").

  Raises:
    TypeError: it is no mapping, or a key is no string.

  >>> check_mapping("efficiency", 0.5, "collectives to shares")
  Traceback (most recent call last):
  ...
  TypeError: `efficiency` must be a dict of collectives to shares, got 0.5.
  """
  if not isinstance(value, Mapping) or not all(
    isinstance(key, str) for key in value
  ):
    raise TypeError(f"`{name}` must be a dict of {noun}, got {value!r:.300}.")
  return dict(value)


def check_float(name: str, x: Any) -> None:
  """Raises unless `x` has a floating-point dtype.

  Args:
    name: the argument's name (or a leaf's path), for the message.
    x: array or ShapeDtypeStruct.

  Raises:
    TypeError: another dtype, or no array at all.

  >>> check_float("x", jnp.zeros(3, jnp.int32))
  Traceback (most recent call last):
  ...
  TypeError: `x` must be a floating-point array, got int32[3].
  """
  shaped = hasattr(x, "shape") and hasattr(x, "dtype")
  if not shaped or not jnp.issubdtype(x.dtype, jnp.floating):
    found = shape_string(x) if shaped else f"{x!r:.200}"
    raise TypeError(f"`{name}` must be a floating-point array, got {found}.")


def check_callable(name: str, value: Any) -> None:
  """Raises unless `value` can be called.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.

  Raises:
    TypeError: it is no function.

  >>> check_callable("loss", 3)
  Traceback (most recent call last):
  ...
  TypeError: `loss` must be a function, got 3.
  """
  if not callable(value):
    raise TypeError(f"`{name}` must be a function, got {value!r}.")


def check_arrays(
  name: str, tree: _types.PyTree, *, numbers: bool = True
) -> None:
  """Raises unless every leaf of a tree is an array, a number or a shape.

  Args:
    name: the argument's name, for the message.
    tree: what the caller gave; a ShapeDtypeStruct is a shape.
    numbers: whether Python numbers, which have no dtype, are allowed.

  Raises:
    TypeError: a leaf is something else.

  >>> check_arrays("batch", {"x": jnp.zeros(3), "y": "text"})
  Traceback (most recent call last):
  ...
  TypeError: `batch` must be a tree of arrays, got 'text' at 'y'.
  """
  for path, x in _tree.named_leaves(tree):
    if not is_array(x) or not (numbers or hasattr(x, "dtype")):
      place = f" at {path!r}" if path else ""
      raise TypeError(
        f"`{name}` must be a tree of arrays, got {x!r:.200}{place}."
      )


def check_like(
  name: str, tree: _types.PyTree, like: _types.PyTree, source: str
) -> None:
  """Raises unless a tree of arrays has the structure and shapes of another.

  Args:
    name: the argument's name, for the message.
    tree: what the caller gave.
    like: arrays or shapes.
    source: where a right tree comes from, for the message.

  Raises:
    TypeError: a leaf is no array.
    ValueError: structure or a shape is another.

  >>> check_like("state", [jnp.zeros(3)], [jnp.zeros(2)], "`init`")
  Traceback (most recent call last):
  ...
  ValueError: `state` must be like that of `init`, got float32[3] at '0', not \
float32[2].
  """
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
      found, wanted = (
        shape_string(jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)))
        for a in (x, y)
      )
      place = f" at {path!r}" if path else ""
      raise ValueError(
        f"`{name}` must be like that of {source}, got {found}{place}, not "
        f"{wanted}."
      )


def is_array(x: Any) -> bool:
  """Says whether JAX can compute with a leaf, or its type with a shape."""
  if isinstance(x, jax.ShapeDtypeStruct | _AVAL):
    return True
  try:
    jax.typeof(x)
  except (OverflowError, TypeError, ValueError):
    return False
  return True


def shape_string(x: Any) -> str:
  """Returns dtype and shape as JAX prints them, such as `float32[2,3]`."""
  # Keys have a dtype that NumPy does not know.
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
  dtype = x.dtype if is_key else jnp.dtype(x.dtype)
  return f"{dtype.name}[{','.join(map(str, x.shape))}]"


def shape_strings(tree: _types.PyTree) -> str:
  """Returns dtypes and shapes of all leaves, for messages."""
  likes = [
    jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
    for a in jax.tree.leaves(tree)
  ]
  return ", ".join(map(shape_string, likes)) if likes else "no arrays"


def same_shapes(tree: _types.PyTree, like: _types.PyTree) -> bool:
  """Returns whether trees have one structure, and leaves like the other's.

  Args:
    tree: arrays, or numbers.
    like: arrays or ShapeDtypeStructs.
  """
  return _tree.same_structure(tree, like) and all(
    jnp.shape(a) == b.shape and jnp.result_type(a) == b.dtype
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(like), strict=True)
  )
