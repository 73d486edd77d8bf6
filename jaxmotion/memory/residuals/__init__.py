"""What a function keeps for its backward pass: chosen, encoded, placed."""

from jaxmotion.memory.residuals._actions import (
  offload as offload,
  recompute as recompute,
)
from jaxmotion.memory.residuals._api import (
  compress_residuals as compress_residuals,
  residuals as residuals,
)
from jaxmotion.memory.residuals._residual import Residual as Residual
