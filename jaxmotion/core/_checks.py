"""Argument checks; errors name the argument, its condition and its value."""

import math
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp


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


def shape_string(x: Any) -> str:
  """Returns dtype and shape as JAX prints them, such as `float32[2,3]`."""
  return f"{jnp.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"
