"""Checks of the properties of codecs and transforms, for your own tests."""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.testing._codec import (
  check_codec as check_codec,
  check_round_trips as check_round_trips,
  check_rounds as check_rounds,
  check_unbiased as check_unbiased,
)
from jaxmotion.testing._laws import (
  Breach as Breach,
  find_breaches as find_breaches,
  make_rows as make_rows,
)
from jaxmotion.testing._transform import (
  check_sharded as check_sharded,
  check_transform as check_transform,
)

_set_public_module(__name__, globals())
