"""Chooses which values to save, and in what form."""

from jaxmotion.memory.residuals.choose._actions import (
  Action as Action,
  ResidualChoice as ResidualChoice,
  ResidualRules as ResidualRules,
  make_choice as make_choice,
  offload as offload,
  recompute as recompute,
)
from jaxmotion.memory.residuals.choose._residual import (
  Residual as Residual,
  full as full,
)
from jaxmotion.memory.residuals.choose._selection import (
  Diagnostics as Diagnostics,
  Options as Options,
  SavedResidual as SavedResidual,
  Selection as Selection,
)
