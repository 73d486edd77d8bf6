"""Chooses which values to save, and in what form."""

from jaxmotion.memory.residuals.choose._actions import (
  Action as Action,
  Choice as Choice,
  Rules as Rules,
  choice as choice,
  offload as offload,
  recompute as recompute,
)
from jaxmotion.memory.residuals.choose._residual import (
  Residual as Residual,
  full as full,
)
from jaxmotion.memory.residuals.choose._selection import (
  Kept as Kept,
  Notes as Notes,
  Options as Options,
  Split as Split,
)
