"""Functions for authors of collectives and of codecs that combine others.

Users of codecs, and most authors of codecs, need none of these names.

`Rounds[T]` is the type of a reduction: a generator that yields a `Message`,
gets the reply, and in the end returns a T. A `MultiRoundCodec` writes one:

  >>> from jaxmotion.codecs import Message, Reduced
  >>> def add_up(x) -> Rounds[Reduced]:
  ...   total = yield Message("sum", x)
  ...   return Reduced(total / 2, x, ())
  >>> next(add_up(1.0)).kind
  'sum'
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
from jaxmotion.codecs._rounds import (
  Rounds as Rounds,
  stand_in_reply as stand_in_reply,
)
