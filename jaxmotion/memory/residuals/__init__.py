"""What a function keeps for its backward pass: chosen, encoded, placed."""

from jaxmotion.memory.residuals._api import (
  compress_residuals as compress_residuals,
  residuals_of as residuals_of,
)
from jaxmotion.memory.residuals._calibrate import calibrate as calibrate
from jaxmotion.memory.residuals._passes import Halves as Halves, split as split
from jaxmotion.memory.residuals.choose import (
  Action as Action,
  Choice as Choice,
  Residual as Residual,
  Rules as Rules,
  offload as offload,
  recompute as recompute,
)
from jaxmotion.memory.residuals.run import HostWords as HostWords
