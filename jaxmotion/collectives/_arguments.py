"""Checks of the arguments that collectives share."""

from typing import Any

import jax.numpy as jnp

from jaxmotion.core import (
  AxisName,
  Key,
  axis_size,
  check_arrays,
  check_axis_name,
  check_instance,
  shape_string,
)


def count_workers(axis_name: AxisName, name: str = "axis_name") -> int:
  """Returns the number of workers along an axis; raises unless it is bound.

  Args:
    axis_name: what the caller gave.
    name: the argument's name, for the message.

  Raises:
    TypeError: no name of an axis.
    ValueError: not an axis of an enclosing shard_map or pmap.
  """
  check_axis_name(name, axis_name)
  return axis_size(axis_name, name)


def check_key(key: Any) -> None:
  """Raises unless `key` is a Key or None.

  Args:
    key: what the caller gave.

  Raises:
    TypeError: it is anything else, such as a key of `jax.random`.
  """
  if key is not None:
    noun = "a jaxmotion.Key (make one with jaxmotion.make_key(seed)) or None"
    check_instance("key", key, Key, noun)


def check_shaped(name: str, like: Any) -> None:
  """Raises unless an argument has the shape and dtype of an array.

  Args:
    name: the argument's name, for the message.
    like: what the caller gave.

  Raises:
    TypeError: it is no array and no ShapeDtypeStruct.
  """
  check_arrays(name, like)
  if not hasattr(like, "shape") or not hasattr(like, "dtype"):
    raise TypeError(
      f"`{name}` must be an array or a ShapeDtypeStruct, got {like!r:.200}."
    )


def check_position(name: str, axis: Any, ndim: int) -> int:
  """Returns the position of an axis as a non-negative int, or raises.

  Args:
    name: the argument's name, for the message.
    axis: what the caller gave; negative positions count from the end.
    ndim: number of axes.

  Raises:
    TypeError: no integer.
    ValueError: no such axis.
  """
  message = f"`{name}` must be an axis of {ndim}, got {axis!r}."
  if type(axis) is not int:
    raise TypeError(message)
  if not -ndim <= axis < ndim:
    raise ValueError(message)
  return axis % ndim


def as_level(level: Any) -> Any:
  """Returns a level as an array; raises unless it is an integer scalar.

  Args:
    level: what the caller gave.

  Raises:
    TypeError: it is anything else.
  """
  message = "`level` must be an integer scalar, got "
  try:
    value = jnp.asarray(level)
  except (OverflowError, TypeError, ValueError) as error:
    raise TypeError(f"{message}{level!r:.200}.") from error
  if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
    raise TypeError(f"{message}{shape_string(value)}.")
  return value
