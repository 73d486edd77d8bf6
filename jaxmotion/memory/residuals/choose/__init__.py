"""Chooses which values to save for the backward pass, and in what form."""

from jaxmotion.memory.residuals.choose._actions import (
  Action as Action,
  Options as Options,
  ResidualChoice as ResidualChoice,
  ResidualRules as ResidualRules,
  check_rules as check_rules,
  make_choice as make_choice,
  make_options as make_options,
  offload as offload,
  recompute as recompute,
  save as save,
  save_and_offload_only_these_names as save_and_offload_only_these_names,
  save_only_these_names as save_only_these_names,
)
from jaxmotion.memory.residuals.choose._coder import (
  Buffers as Buffers,
  differentiate_once as differentiate_once,
)
from jaxmotion.memory.residuals.choose._residual import (
  Diagnostics as Diagnostics,
  Residual as Residual,
  count_device_bytes as count_device_bytes,
  fullest_tile_fraction as fullest_tile_fraction,
)
from jaxmotion.memory.residuals.choose._selection import (
  ResidualChooser as ResidualChooser,
  Selection as Selection,
)
from jaxmotion.memory.residuals.choose._trade import SMALL as SMALL
