"""Calls of the metrics of optimizer states."""

import numpy as np

from jaxmotion import wire
from tests.arguments.calls import Lazy
from tests.arguments.checkpoint import MESH, make_state

TRACED = True
GIVEN = {
  "opt_state": Lazy(make_state),
  "mesh": MESH,
  "level": np.int32(0),
  "sent": wire.Ledger(),
}
