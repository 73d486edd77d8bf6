"""Functions for authors of collectives and of codecs that combine others.

Users of codecs, and most authors of codecs, need none of these names.
"""

from jaxmotion.codecs._codec import (
  LeafGroup as LeafGroup,
  check_codec as check_codec,
)
from jaxmotion.codecs._division import Division as Division
from jaxmotion.codecs._partition import (
  Partition as Partition,
  fold_paths as fold_paths,
  partition as partition,
)
from jaxmotion.codecs.combinators._multi_round import (
  stand_in_reply as stand_in_reply,
)
