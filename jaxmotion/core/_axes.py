"""Names of mesh axes: of workers, or of hosts and the devices of each host."""

import dataclasses
from collections.abc import Hashable
from typing import Any, TypeAlias

_Names: TypeAlias = Hashable | tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class HostAxes:
  """Names the mesh axes of the hosts and of the devices of each host.

  Functions take it as the workers' `axis_name`: the workers are the devices of
  all hosts. An exchange then reduces within a host first, and each payload
  crosses to another host once. A tuple of the same names is another exchange,
  in which each device sends to all others.

  Attributes:
    hosts: the axis of the hosts, or a tuple of axes.
    devices: the axis of the devices of one host, or a tuple of axes.

  Raises:
    TypeError, ValueError: one of both is no name, or they share one.

  Example:
    >>> from jaxmotion import HostAxes
    >>> axes = HostAxes("host", "device")
    >>> axes.names
    ('host', 'device')
    >>> jax.P(axes.names)  # Functions of JAX take the names.
    P(('host', 'device'),)
  """

  hosts: _Names
  devices: _Names

  def __post_init__(self) -> None:
    for field in ("hosts", "devices"):
      names = getattr(self, field)
      check_axis_name(field, names)
      # A tuple of one name is that name, so that equal axes compare as equal.
      if isinstance(names, tuple) and len(names) == 1:
        object.__setattr__(self, field, names[0])
    if set(axis_names(self.hosts)) & set(axis_names(self.devices)):
      raise ValueError(
        f"`devices` must name axes other than `hosts` = {self.hosts!r}, got "
        f"{self.devices!r}."
      )

  @property
  def names(self) -> tuple[Any, ...]:
    """The names of all axes, those of the hosts first."""
    return (*axis_names(self.hosts), *axis_names(self.devices))


# One mesh (or pmap) axis, several that are exchanged over together, or both.
AxisName: TypeAlias = _Names | HostAxes


def axis_names(axis_name: AxisName) -> tuple[Any, ...]:
  """Returns the axis names as a tuple."""
  if isinstance(axis_name, HostAxes):
    return axis_name.names
  return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def comparable_axes(axis_name: AxisName) -> tuple[Any, ...] | HostAxes:
  """Returns axes in a form in which one name equals the tuple of it."""
  return axis_name if isinstance(axis_name, HostAxes) else axis_names(axis_name)


def split_axes(axis_name: AxisName) -> tuple[Any, Any]:
  """Returns the axes of hosts and of their devices, or of workers and ()."""
  if isinstance(axis_name, HostAxes):
    return axis_name.hosts, axis_name.devices
  return axis_name, ()


def check_axis_name(name: str, value: Any) -> None:
  """Raises unless `value` names a mesh axis, or several as a tuple."""
  names = value if isinstance(value, tuple) else (value,)
  are_names = {str}.issuperset(map(type, names))
  if are_names and len(set(names)) == len(names) > 0:
    return
  raise (ValueError if are_names else TypeError)(
    f"`{name}` must be the name of a mesh axis or a tuple of names, got "
    f"{value!r}."
  )


def flatten_axes(name: str, value: Any) -> AxisName:
  """Returns the names that JAX takes for all workers' axes, or raises."""
  if isinstance(value, HostAxes):
    return value.names
  check_axis_name(name, value)
  return value
