"""Parameters that live on the host and travel packed."""

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
