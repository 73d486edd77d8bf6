"""Evaluates the two passes with the chosen residuals."""

from jaxmotion.memory.residuals.run._backward import backward as backward
from jaxmotion.memory.residuals.run._forward import (
  Words as Words,
  forward as forward,
  plain as plain,
)
from jaxmotion.memory.residuals.run._host_buffers import (
  HostBuffers as HostBuffers,
)
from jaxmotion.memory.residuals.run._scan import run_loop as run_loop
