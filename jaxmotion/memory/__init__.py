"""Parameters that live on the host and travel packed."""

from jaxmotion.memory._host_resident import host_resident as host_resident
from jaxmotion.memory._state import HostState as HostState
