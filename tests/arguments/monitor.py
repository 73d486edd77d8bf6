"""Calls of the metrics of optimizer states."""

import numpy as np

from jaxmotion import wire
from tests.arguments.calls import Call, Lazy
from tests.arguments.checkpoint import MESH, make_state

CALLS = {
  "monitor.metrics": Call(
    Lazy(make_state),
    MESH,
    level=np.int32(0),
    sent=wire.Ledger(),
    traced=True,
  ),
}
UNCALLED = {}
ACCEPTED = {}
KNOWN_BAD = set()
