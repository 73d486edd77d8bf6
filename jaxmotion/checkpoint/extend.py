"""Second tier of checkpoints, for other rooms.

Users of checkpoints need none of these names.
"""

from jaxmotion.checkpoint._layout import (
  make_transformation as make_transformation,
)
