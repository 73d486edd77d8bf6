"""Keeps parameters on the host and streams them to the device encoded."""

from jaxmotion.memory.weights._host_resident import (
  host_resident as host_resident,
)
from jaxmotion.memory.weights._state import HostState as HostState
