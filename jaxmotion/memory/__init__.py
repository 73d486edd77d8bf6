"""Memory savings: residuals, host-resident weights, optimizer state."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.memory._memory_kind import (
  memory_kinds as memory_kinds,
  resolve_memory_kind as resolve_memory_kind,
)
from jaxmotion.memory.residuals import (
  calibrate_zero_value as calibrate_zero_value,
  compress_residuals as compress_residuals,
  offload as offload,
  recompute as recompute,
  residuals_of as residuals_of,
  save as save,
  save_and_offload_only_these_names as save_and_offload_only_these_names,
  save_only_these_names as save_only_these_names,
)
from jaxmotion.memory.state import (
  CompressedState as CompressedState,
  EncodedLeaf as EncodedLeaf,
  OptimizerInBackward as OptimizerInBackward,
  adamw_8bit as adamw_8bit,
  compress_state as compress_state,
  decompress_state as decompress_state,
)
from jaxmotion.memory.weights import (
  HostResident as HostResident,
  HostState as HostState,
)

_set_public_module(__name__, globals())
