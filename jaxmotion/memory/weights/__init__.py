"""Keeps parameters on the host and sends them to the device encoded."""

from jaxmotion.memory.weights._host_resident import (
  HostResident as HostResident,
)
from jaxmotion.memory.weights._state import HostState as HostState
