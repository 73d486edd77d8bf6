"""Measured seconds by size."""

from __future__ import annotations

import bisect
import dataclasses
import math

import numpy as np

from jaxmotion.perfmodel.platform._units import check_quantity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
  """Seconds of one operation at several sizes.

  Between them it is interpolated, a straight line in the logarithms. What is
  larger grows in proportion. What is smaller takes what the smallest took,
  less its share of what grows with the size (see `line`).

  Args:
    sizes: increasing, in the unit of what was measured.
    seconds: of each size, never decreasing.
    noise: half of the spread of the repeats (10th to 90th percentile),
      divided by those seconds; the median over the sizes.

  Raises:
    ValueError: sizes or seconds that are not so.

  Example:
    >>> curve = Curve(sizes=(100, 10_000), seconds=(1.0, 100.0), noise=0.05)
    >>> round(curve.at(1000), 9), curve.at(50), curve.at(20_000)
    (10.0, 0.5, 200.0)
    >>> curve.covers(1000), curve.covers(20_000)
    (True, False)
  """

  sizes: tuple[float, ...]
  seconds: tuple[float, ...]
  noise: float

  def __post_init__(self) -> None:
    for name in ("sizes", "seconds"):
      values = tuple(getattr(self, name))
      object.__setattr__(self, name, values)
      for i, value in enumerate(values):
        check_quantity(f"{name}[{i}]", value)
    check_quantity("noise", self.noise, 0.0)
    if len(self.sizes) != len(self.seconds) or not self.sizes:
      raise ValueError(
        "`seconds` must be as many as `sizes`, at least one, got "
        f"{len(self.seconds)} for {len(self.sizes)}."
      )
    if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
      raise ValueError(f"`sizes` must increase, got {self.sizes}.")
    if list(self.seconds) != sorted(self.seconds):
      raise ValueError(f"`seconds` must never decrease, got {self.seconds}.")

  def covers(self, size: float) -> bool:
    """Whether the size is between measured ones."""
    return self.sizes[0] <= size <= self.sizes[-1]

  def at(self, size: float) -> float:
    """Seconds of a size."""
    if size <= self.sizes[0]:
      least = min(self.line()[0], self.seconds[0])
      return least + (self.seconds[0] - least) * size / self.sizes[0]
    if size >= self.sizes[-1]:
      return self.seconds[-1] * (size / self.sizes[-1])
    i = bisect.bisect(self.sizes, size)
    (x0, x1), (y0, y1) = self.sizes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
    share = math.log(size / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share

  def line(self) -> tuple[float, float, float]:
    r"""The line `a + b x` of least relative error.

    .. math::
      \min_{a, b \ge 0} \sum_i ((a + b x_i) / t_i - 1)^2

    Returns:
      `a` in seconds, `b` in seconds a unit of size, and the mean absolute
      relative error.
    """
    x, t = np.array(self.sizes), np.array(self.seconds)
    columns = np.stack([1 / t, x / t], axis=1)
    # One at a time, where both together would make one negative.
    fits = []
    for keep in ([0, 1], [0], [1]):
      part, *_ = np.linalg.lstsq(columns[:, keep], np.ones_like(t), rcond=None)
      ab = np.zeros(2)
      ab[keep] = part
      if (ab >= 0).all():
        error = np.abs(columns @ ab - 1)
        line = float(ab[0]), float(ab[1]), float(error.mean())
        fits.append((float(np.sum(error**2)), line))
    return min(fits)[1]
