"""Calls of the controllers."""

import jax.numpy as jnp
import numpy as np

from jaxmotion import controllers
from jaxmotion.controllers import Times
from tests.arguments.calls import Call, Lazy
from tests.arguments.wrong_values import WRONG

SIGNAL = np.ones(3, np.float32)
TIMES = Times(SIGNAL, SIGNAL)
PARAMS = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
GROUPS = controllers.Groups(("first", "second"), (0, 1))
INSTANCES = {
  "awp": controllers.awp(threshold=0.0, interval=2),
  "bandwidth": controllers.bandwidth(level_bytes=(1, 2)),
  "error_budget": controllers.error_budget(budget=0.1),
  "fixed": controllers.fixed(1),
  "Groups": GROUPS,
}
GIVEN = {
  "tree": PARAMS,
  "params": PARAMS,
  "groups": GROUPS,
  "threshold": 0.0,
  "interval": 2,
  "level_bytes": (1, 2),
  "budget": 0.1,
  "at": 1,
}
CALLS = {
  "controllers.Groups": Call(("first", "second"), (0, 1)),
  "controllers.Groups.merge": Call(Lazy(lambda: GROUPS.split(PARAMS))),
  "controllers.group_by": Call(PARAMS, [("a", "first"), ("b", None)]),
  "controllers.group_norms": Call(traced=True),
  "controllers.level_changes": Call(
    Lazy(lambda: controllers.fixed(1).init(jnp.ones(3)).history)
  ),
}
for _name in ("awp", "bandwidth", "error_budget", "fixed"):
  _signal = TIMES if _name == "bandwidth" else SIGNAL
  _state = Lazy(lambda c=INSTANCES[_name], signal=_signal: c.init(signal))
  for _method in ("init", "update", "level"):
    CALLS[f"controllers.{_name}.{_method}"] = Call(
      given={"signal": _signal, "state": _state}
    )
UNCALLED = {"controllers.Controller*": "abstract: every controller defines it"}
ACCEPTED = {
  ("controllers.awp", "threshold"): {
    "minus_one": "no norm falls by more: the level never rises",
    "zero": "every fall counts",
    "huge": "every update counts",
  },
  ("controllers.bandwidth", "decay"): {"zero": "the past has no weight"},
  ("controllers.error_budget", "budget"): {
    "zero": "no error is allowed",
    "huge": "every error is allowed",
  },
  ("controllers.fixed", "at"): {"zero": "the lowest level"},
  ("controllers.fixed.update", "signal"): dict.fromkeys(WRONG, "it is ignored"),
}
