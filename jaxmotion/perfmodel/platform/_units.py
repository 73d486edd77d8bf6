"""Quantities whose units cannot be mistaken."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Rate:
  """Bytes per second. The unit is spelt wherever one is made.

  Args:
    bytes_per_s: the rate; positive.

  Raises:
    ValueError: not a positive finite number.

  Example:
    >>> gbit_per_s(10), gbyte_per_s(1.25) == gbit_per_s(10)
    (Rate(bytes_per_s=1250000000.0), True)
  """

  bytes_per_s: float

  def __post_init__(self) -> None:
    check_quantity("bytes_per_s", self.bytes_per_s)

  def __str__(self) -> str:
    gbyte = self.bytes_per_s / 1e9
    return f"{gbyte:.4g} GB/s = {8 * gbyte:.4g} Gbit/s"


def gbit_per_s(gbit: float) -> Rate:
  """Returns a rate given in gigabits (1e9 bits) per second, as links are sold.

  Args:
    gbit: Gbit/s.

  Example:
    >>> print(gbit_per_s(100))
    12.5 GB/s = 100 Gbit/s
  """
  return Rate(bytes_per_s=gbit * 1e9 / 8)


def gbyte_per_s(gbyte: float) -> Rate:
  """Returns a rate given in gigabytes (1e9 bytes) per second, as memory is.

  Args:
    gbyte: GB/s.

  Example:
    >>> print(gbyte_per_s(3350))
    3350 GB/s = 2.68e+04 Gbit/s
  """
  return Rate(bytes_per_s=gbyte * 1e9)


def check_quantity(
  name: str,
  value: Any,
  low: float | None = None,
  high: float = math.inf,
  unit: str = "",
) -> None:
  """Raises unless `value` is a finite number in [low, high].

  Args:
    name: the argument's name, for the message.
    value: what the caller gave.
    low: least value allowed; None allows any positive one.
    high: greatest value allowed.
    unit: what to say of the unit.
  """
  if type(value) not in (int, float):
    raise TypeError(f"`{name}` must be a number, got {value!r}.")
  hint = f" ({unit})" if unit else ""
  if not math.isfinite(value) or (low is None and value <= 0):
    raise ValueError(
      f"`{name}` must be positive and finite{hint}, got {value!r}."
    )
  if low is not None and value < low:
    raise ValueError(f"`{name}` must be at least {low:g}{hint}, got {value!r}.")
  if value > high:
    raise ValueError(f"`{name}` must be at most {high:g}{hint}, got {value!r}.")


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
