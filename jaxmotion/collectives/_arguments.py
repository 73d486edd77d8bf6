"""Checks of the arguments that collectives share."""

from typing import Any

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import AxisName


def count_workers(axis_name: AxisName, name: str = "axis_name") -> int:
  """Returns the number of workers along an axis; raises unless it is bound."""
  core.check_axis_name(name, axis_name)
  return core.axis_size(axis_name, name)


def joint_axes(axis_name: AxisName, local_axis: AxisName) -> tuple[Any, ...]:
  """Returns the axes of hosts and of their devices as one tuple.

  Args:
    axis_name: the axis of the hosts, or several.
    local_axis: the axis of the devices of one host, or several.

  Raises:
    ValueError: an axis is in both.

  Example:
    >>> joint_axes("host", "device")
    ('host', 'device')
  """
  core.check_axis_name("axis_name", axis_name)
  core.check_axis_name("local_axis", local_axis)
  hosts, devices = core.axis_names(axis_name), core.axis_names(local_axis)
  if set(hosts) & set(devices):
    raise ValueError(
      "`local_axis` must name axes other than `axis_name` = "
      f"{axis_name!r}, got {local_axis!r}."
    )
  return (*hosts, *devices)


def all_axes(
  axis_name: AxisName, local_axis: AxisName | None, local_codec: Any
) -> AxisName:
  """Returns the axes of all workers that take part.

  Args:
    axis_name: the workers' axis, or that of the hosts.
    local_axis: the axis of the devices of one host, or None.
    local_codec: codec within a host, which needs a `local_axis`.

  Raises:
    ValueError: a codec without an axis, or an axis in both.

  Example:
    >>> all_axes("data", None, None), all_axes("host", "device", None)
    ('data', ('host', 'device'))
  """
  if local_axis is not None:
    return joint_axes(axis_name, local_axis)
  if local_codec is not None:
    raise ValueError(
      "`local_codec` must be None unless `local_axis` is given, got "
      f"{local_codec!r}."
    )
  return axis_name


def check_key(key: Any) -> None:
  """Raises unless `key` is a Key or None."""
  if key is not None:
    noun = "a jaxmotion.Key (make one with jaxmotion.make_key(seed)) or None"
    core.check_instance("key", key, core.Key, noun)


def check_shaped(name: str, like: Any) -> None:
  """Raises unless an argument has the shape and dtype of an array."""
  core.check_arrays(name, like)
  if not hasattr(like, "shape") or not hasattr(like, "dtype"):
    raise TypeError(
      f"`{name}` must be an array or a ShapeDtypeStruct, got {like!r:.200}."
    )


def check_position(name: str, axis: Any, ndim: int) -> int:
  """Returns the position of an axis as a non-negative int, or raises."""
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
    raise TypeError(f"{message}{core.shape_string(value)}.")
  return value
