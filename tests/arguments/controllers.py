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
TABLE = {
  "awp": (controllers.awp(threshold=0.0, interval=2), SIGNAL),
  "bandwidth": (controllers.bandwidth(level_bytes=(1, 2)), TIMES),
  "error_budget": (controllers.error_budget(budget=0.1), SIGNAL),
  "fixed": (controllers.fixed(1), SIGNAL),
}


def initial(name):
  controller, signal = TABLE[name]
  return Lazy(lambda: controller.init(signal))


CALLS = {
  "controllers.awp": Call(threshold=0.0, interval=2),
  "controllers.awp_preset": Call("alexnet"),
  "controllers.bandwidth": Call(level_bytes=(1, 2)),
  "controllers.error_budget": Call(budget=0.1),
  "controllers.fixed": Call(1),
  "controllers.Groups": Call(("first", "second"), (0, 1)),
  "controllers.Groups.split": Call(PARAMS, on=GROUPS.split),
  "controllers.Groups.merge": Call(
    Lazy(lambda: GROUPS.split(PARAMS)), PARAMS, on=GROUPS.merge
  ),
  "controllers.group_by": Call(PARAMS, [("a", "first"), ("b", None)]),
  "controllers.group_norms": Call(PARAMS, GROUPS, traced=True),
  "controllers.level_changes": Call(
    Lazy(lambda: controllers.fixed(1).init(jnp.ones(3)).history)
  ),
}
for _name, (_controller, _signal) in TABLE.items():
  CALLS |= {
    f"controllers.{_name}.init": Call(
      _signal, on=_controller.init, traced=True
    ),
    f"controllers.{_name}.update": Call(
      _signal, initial(_name), on=_controller.update, traced=True
    ),
    f"controllers.{_name}.level": Call(
      initial(_name), on=_controller.level, traced=True
    ),
  }
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
KNOWN_BAD = set()
