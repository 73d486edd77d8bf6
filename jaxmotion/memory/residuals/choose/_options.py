"""Options of the choice of residuals."""

from __future__ import annotations

from typing import NamedTuple

from jaxmotion import core, perfmodel
from jaxmotion.memory.residuals.choose import _actions


class Options(NamedTuple):
  """Options of the choice of residuals.

  Attributes:
    choose: function of a residual that returns its action.
    memory_budget: share of the residuals' bytes, or bytes; see
      `compress_residuals`.
    device: device whose times are predicted.
    measure: whether diagnostics measure the nonzeros of sparse residuals.
  """

  choose: _actions.ResidualChoice
  memory_budget: float | None
  device: perfmodel.Device
  measure: bool = False


def make_options(
  codec: _actions.Action | _actions.ResidualRules | _actions.ResidualChoice,
  memory_budget: float | None,
  device: perfmodel.Device | None,
) -> Options:
  """Returns the options that `compress_residuals` was given, checked."""
  if memory_budget is not None:
    core.check_number("memory_budget", memory_budget, 0)
  if device is None:
    device = perfmodel.builtin_platform("h100_node").device
  core.check_instance("device", device, perfmodel.Device, "a Device")
  return Options(_actions.make_choice(codec), memory_budget, device)
