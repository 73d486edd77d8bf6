"""Memory savings: residuals, host-resident weights, optimizer state."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.memory._compress_state import (
  adamw_8bit as adamw_8bit,
  compress_state as compress_state,
)
from jaxmotion.memory._encoded_leaf import (
  EncodedLeaf as EncodedLeaf,
  decompress_state as decompress_state,
)
from jaxmotion.memory._weights import (
  HostResident as HostResident,
  HostState as HostState,
)
from jaxmotion.memory.residuals import (
  OptimizerInBackward as OptimizerInBackward,
  calibrate_zero_value as calibrate_zero_value,
  compress_residuals as compress_residuals,
  offload as offload,
  recompute as recompute,
  residuals_of as residuals_of,
  save as save,
  save_and_offload_only_these_names as save_and_offload_only_these_names,
  save_only_these_names as save_only_these_names,
)

_set_public_module(__name__, globals())
