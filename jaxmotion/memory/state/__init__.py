"""Keeps optimizer state encoded between updates."""

from jaxmotion.memory.state._pack_state import (
  PackState as PackState,
  pack_state as pack_state,
)
from jaxmotion.memory.state._packed import (
  Packed as Packed,
  unpack_state as unpack_state,
)
from jaxmotion.memory.state._update_in_backward import (
  update_in_backward as update_in_backward,
)
