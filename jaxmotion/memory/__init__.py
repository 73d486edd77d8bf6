"""Arrays that live or travel encoded: residuals, weights on the host."""

from jaxmotion.memory._host_resident import host_resident as host_resident
from jaxmotion.memory._pack_state import (
  PackState as PackState,
  pack_state as pack_state,
)
from jaxmotion.memory._packed import (
  Packed as Packed,
  unpack_state as unpack_state,
)
from jaxmotion.memory._place import (
  memory_kinds as memory_kinds,
  placed as placed,
)
from jaxmotion.memory._state import HostState as HostState
from jaxmotion.memory._update_in_backward import (
  update_in_backward as update_in_backward,
)
from jaxmotion.memory.residuals import (
  calibrate as calibrate,
  compress_residuals as compress_residuals,
  offload as offload,
  recompute as recompute,
  residuals_of as residuals_of,
)
