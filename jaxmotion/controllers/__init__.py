"""Controllers that adapt a level to norms, errors or times during training.

Each is a frozen configuration with `init(signal) -> state`,
`update(signal, state) -> state` and `level(state) -> int32[groups]`, all of
which can be jitted, vmapped and checkpointed. A signal holds one number for
each group of parameters; level 0 moves the fewest bits. The caller decides what
a level means: controllers know no codec and no collective.
"""

from jaxmotion.controllers._awp import awp as awp
from jaxmotion.controllers._bandwidth import (
  Times as Times,
  bandwidth as bandwidth,
)
from jaxmotion.controllers._base import (
  Controller as Controller,
  History as History,
  LevelChange as LevelChange,
  fixed as fixed,
  level_changes as level_changes,
)
from jaxmotion.controllers._error_budget import error_budget as error_budget
from jaxmotion.controllers._groups import (
  Groups as Groups,
  group_by as group_by,
  group_norms as group_norms,
)
from jaxmotion.core import set_public_module as _set_public_module

_set_public_module(__name__, globals())
