"""Chooses which values to save for the backward pass, and in what form."""

from jaxmotion.memory.residuals.choose._actions import (
  Action as Action,
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
from jaxmotion.memory.residuals.choose._coder import (
  Buffers as Buffers,
  differentiate_once as differentiate_once,
)
from jaxmotion.memory.residuals.choose._diagnostics import (
  Diagnostics as Diagnostics,
)
from jaxmotion.memory.residuals.choose._options import (
  Options as Options,
  make_options as make_options,
)
from jaxmotion.memory.residuals.choose._residual import (
  Residual as Residual,
  fullest_tile_share as fullest_tile_share,
)
from jaxmotion.memory.residuals.choose._selection import (
  ResidualChooser as ResidualChooser,
  SavedResidual as SavedResidual,
  Selection as Selection,
)
from jaxmotion.memory.residuals.choose._shares import (
  count_device_bytes as count_device_bytes,
  find_largest_share as find_largest_share,
)
from jaxmotion.memory.residuals.choose._turn import (
  count_bytes as count_bytes,
  find_held as find_held,
)
