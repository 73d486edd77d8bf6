"""Second tier of checkpoints, for other rooms.

Users of checkpoints need none of these names.
"""

from jaxmotion.checkpoint._convert import shard_shapes as shard_shapes
