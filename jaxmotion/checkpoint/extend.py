"""Second tier of checkpoints, for other rooms.

Users of checkpoints need none of these names.
"""

from jaxmotion.checkpoint._convert import (
  parts_layout as parts_layout,
  shard_shapes as shard_shapes,
  state_layout as state_layout,
)
from jaxmotion.checkpoint._layout import (
  make_transformation as make_transformation,
)
