"""Arrays that live or travel encoded: residuals, weights on the host."""

from jaxmotion.memory._memory_kind import (
  memory_kinds as memory_kinds,
  placed as placed,
)
from jaxmotion.memory.residuals import (
  calibrate as calibrate,
  compress_residuals as compress_residuals,
  offload as offload,
  recompute as recompute,
  residuals_of as residuals_of,
)
from jaxmotion.memory.state import (
  Packed as Packed,
  PackState as PackState,
  pack_state as pack_state,
  unpack_state as unpack_state,
  update_in_backward as update_in_backward,
)
from jaxmotion.memory.weights import (
  HostState as HostState,
  host_resident as host_resident,
)
