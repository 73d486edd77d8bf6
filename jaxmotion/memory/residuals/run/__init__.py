"""Runs the two passes of a function with the selected residuals."""

from jaxmotion.memory.residuals.run._backward import backward as backward
from jaxmotion.memory.residuals.run._forward import (
  evaluate_outputs as evaluate_outputs,
  forward as forward,
  list_gates as list_gates,
)
from jaxmotion.memory.residuals.run._scan import (
  HostBuffers as HostBuffers,
  run_scan as run_scan,
)
