"""Rates of bytes whose unit cannot be mistaken."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxmotion import core


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Rate:
  """A rate in bytes per second, made by a function that names the unit.

  Args:
    bytes_per_s: bytes per second, positive.

  Raises:
    TypeError: `bytes_per_s` is not a number.
    ValueError: `bytes_per_s` is not positive and finite.

  Example:
    >>> gbit_per_s(10), gbyte_per_s(1.25) == gbit_per_s(10)
    (Rate(bytes_per_s=1250000000.0), True)
  """

  bytes_per_s: float

  def __post_init__(self) -> None:
    core.check_number("bytes_per_s", self.bytes_per_s, 0, open_low=True)

  def __str__(self) -> str:
    gbyte = self.bytes_per_s / 1e9
    return f"{gbyte:.4g} GB/s = {8 * gbyte:.4g} Gbit/s"


def gbit_per_s(gbit: float) -> Rate:
  """Returns a rate given in gigabits (1e9 bits) per second, as links are sold.

  Args:
    gbit: gigabits per second.

  Returns:
    The rate.

  Raises:
    TypeError: `gbit` is not a number.
    ValueError: `gbit` is not positive and finite.

  Example:
    >>> print(gbit_per_s(100))
    12.5 GB/s = 100 Gbit/s
  """
  core.check_number("gbit", gbit, 0, open_low=True)
  return Rate(bytes_per_s=gbit * 1e9 / 8)


def gbyte_per_s(gbyte: float) -> Rate:
  """Returns a rate given in gigabytes (1e9 bytes) per second, as memory is.

  Args:
    gbyte: gigabytes per second.

  Returns:
    The rate.

  Raises:
    TypeError: `gbyte` is not a number.
    ValueError: `gbyte` is not positive and finite.

  Example:
    >>> print(gbyte_per_s(3350))
    3350 GB/s = 2.68e+04 Gbit/s
  """
  core.check_number("gbyte", gbyte, 0, open_low=True)
  return Rate(bytes_per_s=gbyte * 1e9)


def check_quantity(
  name: str, value: Any, low: float, high: float, unit: str
) -> None:
  """Raises unless `value` is a number in [low, high], and names its unit."""
  try:
    core.check_number(name, value, low, high)
  except ValueError as error:
    raise ValueError(f"{error} Its unit is {unit}.") from None


def check_rate(name: str, value: Any, low: float, high: float) -> None:
  """Raises unless `value` is a Rate of `low` to `high` bytes per second."""
  if not isinstance(value, Rate):
    raise TypeError(
      f"`{name}` must be a Rate, made by gbit_per_s(...) or gbyte_per_s(...), "
      f"got {value!r}: are these bits or bytes?"
    )
  if not low <= value.bytes_per_s <= high:
    raise ValueError(
      f"`{name}` must be between {low:g} and {high:g} bytes/s, got {value}: "
      "are these bits, or was the unit applied twice?"
    )
