"""Residuals: what a function saves for its backward pass, and in what form."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.memory.residuals._api import (
  compress_residuals as compress_residuals,
  residuals_of as residuals_of,
)
from jaxmotion.memory.residuals._calibrate import (
  calibrate_zero_value as calibrate_zero_value,
)
from jaxmotion.memory.residuals._passes import (
  Passes as Passes,
  split_passes as split_passes,
)
from jaxmotion.memory.residuals.choose import (
  Action as Action,
  Residual as Residual,
  ResidualChoice as ResidualChoice,
  ResidualRules as ResidualRules,
  check_rules as check_rules,
  make_choice as make_choice,
  offload as offload,
  recompute as recompute,
  save as save,
  save_and_offload_only_these_names as save_and_offload_only_these_names,
  save_only_these_names as save_only_these_names,
)
from jaxmotion.memory.residuals.run import HostBuffers as HostBuffers

_set_public_module(__name__, globals())
