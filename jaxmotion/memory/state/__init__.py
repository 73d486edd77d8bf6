"""Keeps optimizer state encoded between updates."""

from jaxmotion.memory.state._adamw_8bit import adamw_8bit as adamw_8bit
from jaxmotion.memory.state._compress_state import (
  CompressedState as CompressedState,
  compress_state as compress_state,
)
from jaxmotion.memory.state._encoded_leaf import (
  EncodedLeaf as EncodedLeaf,
  decompress_state as decompress_state,
)
from jaxmotion.memory.state._optimizer_in_backward import (
  OptimizerInBackward as OptimizerInBackward,
)
