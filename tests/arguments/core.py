"""Calls of the types, keys and state markers."""

import numpy as np

from jaxmotion.core import Key, PerWorker
from tests.arguments.calls import Call

KEY = Key(np.uint32(1), np.uint32(2))
STATE = {"count": np.float32(0), "e": PerWorker(np.zeros((4, 3), np.float32))}

CALLS = {
  "core.HostAxes": Call("host", "device"),
  "core.make_key": Call(0, 1, traced=True),
  "core.Key.fold": Call(3, on=KEY.fold),
  "core.Key.fold_path": Call("a/b", on=KEY.fold_path),
  "core.state_specs": Call(STATE, "data"),
}
UNCALLED = {"core.*": "other rooms call it with what they have checked"}
_MODULO = {"huge": "seeds count modulo 2**32"}
_NO_MESH = {"misspelt": "no mesh is known here"}
ACCEPTED = {
  ("*", "seed"): _MODULO,
  ("*", "worker"): _MODULO,
  ("*", "data"): _MODULO,
  ("core.Key.fold_path", "path"): {"misspelt": "a path like any other"},
  ("core.HostAxes", "hosts"): _NO_MESH,
  ("core.HostAxes", "devices"): _NO_MESH,
  ("core.state_specs", "axis_name"): _NO_MESH,
  ("core.state_specs", "state"): dict.fromkeys(
    ("wrapped", "reshaped"), "any state has specs"
  ),
}
