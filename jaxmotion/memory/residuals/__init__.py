"""Residuals: what a function saves for its backward pass, and in what form.

The rooms that build on residuals find the types of actions here, too.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.memory.residuals._api import (
  calibrate_zero_value as calibrate_zero_value,
  compress_residuals as compress_residuals,
  residuals_of as residuals_of,
)
from jaxmotion.memory.residuals._optimizer_in_backward import (
  OptimizerInBackward as OptimizerInBackward,
)
from jaxmotion.memory.residuals.choose import (
  Action as Action,
  Residual as Residual,
  ResidualChoice as ResidualChoice,
  ResidualRules as ResidualRules,
  offload as offload,
  recompute as recompute,
  save as save,
  save_and_offload_only_these_names as save_and_offload_only_these_names,
  save_only_these_names as save_only_these_names,
)

_set_public_module(__name__, globals())
