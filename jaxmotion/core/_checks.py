"""Argument checks; errors name the argument, its condition and its value."""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.core._tree import named_leaves, same_structure
from jaxmotion.core._types import PyTree


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
  message = f"`{name}` must be an integer {span}, got {value!r}."
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
  left, right = "(" if open_low else "[", ")" if open_high else "]"
  message = (
    f"`{name}` must be a number in {left}{low:g}, {high:g}{right}, got "
    f"{value!r}."
  )
  # Only plain Python values: the repr and the config of a codec print them.
  if type(value) not in (int, float):
    raise TypeError(message)
  above = low < value or (value == low and not open_low)
  below = value < high or (value == high and not open_high)
  if not (above and below):
    raise ValueError(message)


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


def check_float(name: str, x: Any) -> None:
  """Raises unless `x` has a floating-point dtype.

  Args:
    name: the argument's name (or a leaf's path), for the message.
    x: array or ShapeDtypeStruct.

  Raises:
    TypeError: another dtype.

  >>> check_float("x", jnp.zeros(3, jnp.int32))
  Traceback (most recent call last):
  ...
  TypeError: `x` must be a floating-point array, got int32[3].
  """
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(
      f"`{name}` must be a floating-point array, got {shape_string(x)}."
    )


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


def check_arrays(name: str, tree: PyTree) -> None:
  """Raises unless every leaf of a tree is an array, a number or a shape.

  Args:
    name: the argument's name, for the message.
    tree: what the caller gave; a ShapeDtypeStruct is a shape.

  Raises:
    TypeError: a leaf is something else.

  >>> check_arrays("batch", {"x": jnp.zeros(3), "y": "text"})
  Traceback (most recent call last):
  ...
  TypeError: `batch` must be a tree of arrays, got 'text' at 'y'.
  """
  for path, x in named_leaves(tree):
    if not _is_array(x):
      place = f" at {path!r}" if path else ""
      raise TypeError(
        f"`{name}` must be a tree of arrays, got {x!r:.200}{place}."
      )


def check_like(name: str, tree: PyTree, like: PyTree, source: str) -> None:
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
  if not same_structure(tree, like):
    raise ValueError(
      f"`{name}` must be like that of {source}, got "
      f"{jax.tree.structure(tree)}, not {jax.tree.structure(like)}."
    )
  for (path, x), y in zip(
    named_leaves(tree), jax.tree.leaves(like), strict=True
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


def _is_array(x: Any) -> bool:
  """Says whether JAX can compute with a leaf, or its type with a shape."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return True
  try:
    jax.typeof(x)
  except (OverflowError, TypeError, ValueError):
    return False
  return True


def shape_string(x: Any) -> str:
  """Returns dtype and shape as JAX prints them, such as `float32[2,3]`."""
  return f"{jnp.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
