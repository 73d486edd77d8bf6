"""States of training that continue on other workers or with another codec."""

from jaxmotion.checkpoint._layout import (
  Layout as Layout,
  describe_state as describe_state,
)
from jaxmotion.checkpoint._resize import (
  check_workers as check_workers,
  resize as resize,
  saved_like as saved_like,
)
from jaxmotion.core import set_public_module as _set_public_module

_set_public_module(__name__, globals())
