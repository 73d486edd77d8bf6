"""Keeps parameters on the host and sends them to the device encoded."""

from jaxmotion.memory._weights._host_resident import (
  HostResident as HostResident,
)
from jaxmotion.memory._weights._state import HostState as HostState
