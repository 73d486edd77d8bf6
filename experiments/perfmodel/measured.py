"""Measured curves of platforms, and how well sizes interpolate one another."""

import dataclasses

from jaxmotion import perfmodel


def left_out_error(curve: perfmodel.Curve) -> float:
  """Returns the mean relative error of sizes interpolated from the others."""
  errors = []
  for i in range(1, len(curve.sizes) - 1):
    rest = dataclasses.replace(
      curve,
      sizes=curve.sizes[:i] + curve.sizes[i + 1 :],
      seconds=curve.seconds[:i] + curve.seconds[i + 1 :],
    )
    errors.append(abs(rest.seconds_at(curve.sizes[i]) / curve.seconds[i] - 1))
  return sum(errors) / max(len(errors), 1)


def platform_curves(platform: perfmodel.Platform) -> dict[str, perfmodel.Curve]:
  """Returns all measured curves of a platform by name."""
  curves = dict(platform.device.measured)
  for axis in platform.axes:
    curves.update(axis.link.measured)
  return curves
