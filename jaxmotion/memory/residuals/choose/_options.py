"""Options of the choice of residuals."""

from __future__ import annotations

from typing import NamedTuple

from jaxmotion.core import check_instance, check_number
from jaxmotion.memory.residuals.choose._actions import (
  Action,
  ResidualChoice,
  ResidualRules,
  make_choice,
)
from jaxmotion.perfmodel import Device, builtin_platform


class Options(NamedTuple):
  """Options of the choice of residuals.

  Attributes:
    choose: function of a residual that returns its action.
    memory_budget: share of the residuals' bytes, or bytes; see
      `compress_residuals`.
    device: device whose times are predicted.
    measure: whether diagnostics measure the nonzeros of sparse residuals.
  """

  choose: ResidualChoice
  memory_budget: float | None
  device: Device
  measure: bool = False


def make_options(
  codec: Action | ResidualRules | ResidualChoice,
  memory_budget: float | None,
  device: Device | None,
) -> Options:
  """Returns the options that `compress_residuals` was given, checked.

  Args:
    codec: how residuals are saved.
    memory_budget: share of the residuals' bytes, bytes, or None.
    device: device whose times are predicted; None for an H100.

  Raises:
    TypeError: an option is of the wrong type.
    ValueError: `memory_budget` is negative.
  """
  if memory_budget is not None:
    check_number("memory_budget", memory_budget, 0)
  if device is None:
    device = builtin_platform("h100_node").device
  check_instance("device", device, Device, "a Device")
  return Options(make_choice(codec), memory_budget, device)
