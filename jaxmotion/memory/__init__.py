"""Parameters that live on the host and travel packed."""

from jaxmotion.memory._host_resident import (
  HostState as HostState,
  host_resident as host_resident,
)
