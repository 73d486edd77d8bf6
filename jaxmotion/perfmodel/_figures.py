"""Figures of a platform: rates with their units, and measured curves."""

import bisect
import dataclasses
import math
from typing import Any

import numpy as np

from jaxmotion import core

_POSITIVE = core.number(0, open_low=True)
_SIZE = core.measured(core.number(0))


class Part:
  """Dataclass of keywords alone, whose errors show the call."""

  def __new__(cls, *args: Any, **kwargs: Any) -> "Part":
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    wrong = [*map(repr, args), *(f"{n}=" for n in kwargs if n not in names)]
    if wrong:
      call = ", ".join(f"{name}=..." for name in names)
      raise TypeError(
        f"`{cls.__name__}` must be called as {cls.__name__}({call}), got "
        f"{', '.join(wrong)}."
      )
    return super().__new__(cls)


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
@core.declare(bytes_per_s=_POSITIVE)
class Rate(Part):
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

  def __str__(self) -> str:
    gbyte = self.bytes_per_s / 1e9
    return f"{gbyte:.4g} GB/s = {8 * gbyte:.4g} Gbit/s"


@core.declare(gbit=_POSITIVE)
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
  return Rate(bytes_per_s=gbit * 1e9 / 8)


@core.declare(gbyte=_POSITIVE)
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
  return Rate(bytes_per_s=gbyte * 1e9)


def quantity_in(low: float, high: float, unit: str) -> core.Kind:
  """Makes the kind of numbers in [low, high], whose unit errors name."""
  number = core.number(low, high)

  def check(name: str, value: Any) -> Any:
    try:
      return number(name, value)
    except ValueError as error:
      raise ValueError(f"{error} Its unit is {unit}.") from None

  return check


def rate_in(low: float, high: float) -> core.Kind:
  """Makes the kind of Rates of `low` to `high` bytes per second."""

  def check(name: str, value: Any) -> Any:
    if not isinstance(value, Rate):
      raise TypeError(
        f"`{name}` must be a Rate, made by gbit_per_s(...) or "
        f"gbyte_per_s(...), got {value!r}: are these bits or bytes?"
      )
    if not low <= value.bytes_per_s <= high:
      raise ValueError(
        f"`{name}` must be between {low:g} and {high:g} bytes/s, got {value}: "
        "are these bits, or was the unit applied twice?"
      )
    return value

  return check


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  sizes=core.sequence("numbers", _POSITIVE),
  seconds=core.sequence("numbers", _POSITIVE),
  noise=core.number(0),
)
class Curve(Part):
  """Measured seconds of one operation at several sizes.

  `seconds_at` interpolates between measured sizes, linearly in the logarithms
  of size and seconds. Beyond the largest size, seconds grow in proportion to
  the size. Below the smallest size, only the part of its seconds that grows
  with the size shrinks; the constant part is that of `fit_line`.

  Args:
    sizes: increasing sizes, in the unit of what was measured (FLOPs, bytes,
      elements).
    seconds: seconds at each size, never decreasing.
    noise: relative noise of the repeats: half of the spread from the 10th to
      the 90th percentile, divided by the seconds; the median over the sizes.

  Raises:
    TypeError: a size, a time or the noise is not a number.
    ValueError: sizes do not increase, seconds decrease, a figure is not
      positive, or there are not as many seconds as sizes.

  Example:
    >>> curve = Curve(sizes=(100, 10_000), seconds=(1.0, 100.0), noise=0.05)
    >>> [round(curve.seconds_at(size), 9) for size in (50, 1000, 20_000)]
    [0.5, 10.0, 200.0]
    >>> curve.covers(1000), curve.covers(20_000)
    (True, False)
  """

  sizes: tuple[float, ...]
  seconds: tuple[float, ...]
  noise: float

  def __post_init__(self) -> None:
    if len(self.sizes) != len(self.seconds) or not self.sizes:
      raise ValueError(
        "`seconds` must be as many as `sizes`, at least one, got "
        f"{len(self.seconds)} for {len(self.sizes)}."
      )
    if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
      raise ValueError(f"`sizes` must increase, got {self.sizes}.")
    if list(self.seconds) != sorted(self.seconds):
      raise ValueError(f"`seconds` must never decrease, got {self.seconds}.")

  @core.declare(size=_SIZE)
  def covers(self, size: float) -> bool:
    """Returns whether a size is between the smallest and the largest.

    Args:
      size: size in the unit of `sizes`.

    Raises:
      TypeError: `size` is not a number.
      ValueError: `size` is negative, infinite or NaN.
    """
    return self.sizes[0] <= size <= self.sizes[-1]

  @core.declare(size=_SIZE)
  def seconds_at(self, size: float) -> float:
    """Returns the seconds at any size, interpolated or extrapolated.

    Args:
      size: size in the unit of `sizes`.

    Raises:
      TypeError: `size` is not a number.
      ValueError: `size` is negative, infinite or NaN.
    """
    if size <= self.sizes[0]:
      constant = min(self.fit_line()[0], self.seconds[0])
      growing = self.seconds[0] - constant
      return constant + growing * size / self.sizes[0]
    if size >= self.sizes[-1]:
      return self.seconds[-1] * (size / self.sizes[-1])
    i = bisect.bisect(self.sizes, size)
    (x0, x1), (y0, y1) = self.sizes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
    share = math.log(size / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share

  def fit_line(self) -> tuple[float, float, float]:
    r"""Returns the line `a + b x` of least relative error.

    .. math::
      \min_{a, b \ge 0} \sum_i ((a + b x_i) / t_i - 1)^2

    Returns:
      `a` in seconds, `b` in seconds per unit of size, and the mean absolute
      relative error.
    """
    x, t = np.array(self.sizes), np.array(self.seconds)
    columns = np.stack([1 / t, x / t], axis=1)
    # Where the unconstrained fit makes a or b negative, the best fit under
    # a, b >= 0 has one of them at zero: fit each alone as well, and keep the
    # best of the fits that are allowed.
    fits = []
    for kept in ([0, 1], [0], [1]):
      part, *_ = np.linalg.lstsq(columns[:, kept], np.ones_like(t), rcond=None)
      ab = np.zeros(2)
      ab[kept] = part
      if (ab >= 0).all():
        error = np.abs(columns @ ab - 1)
        line = float(ab[0]), float(ab[1]), float(error.mean())
        fits.append((float(np.sum(error**2)), line))
    return min(fits)[1]
