"""Calls of the types, keys and state markers."""

import numpy as np

from jaxmotion.core import Key, PerWorker
from tests.arguments.calls import Call

KEY = Key(np.uint32(1), np.uint32(2))
STATE = {"count": np.float32(0), "e": PerWorker(np.zeros((4, 3), np.float32))}

CALLS = {
  "core.make_key": Call(0, 1, traced=True),
  "core.Key.fold": Call(3, on=KEY.fold, traced=True),
  "core.Key.fold_path": Call("a/b", on=KEY.fold_path, traced=True),
  "core.state_specs": Call(STATE, "data"),
}
UNCALLED = {"core.*": "other rooms call it with what they have checked"}
ACCEPTED = {}
KNOWN_BAD = {
  ("core.make_key", "seed"),
  ("core.make_key", "worker"),
  ("core.Key.fold", "data"),
  ("core.Key.fold_path", "path"),
  ("core.state_specs", "state"),
  ("core.state_specs", "axis_name"),
}
