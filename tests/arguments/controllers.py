"""Calls of the controllers."""

import jax.numpy as jnp
import numpy as np

from jaxmotion import controllers
from jaxmotion.controllers import Times
from tests.arguments.calls import Call, Lazy

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
ACCEPTED = {}
KNOWN_BAD = {
  ("controllers.awp", "threshold"),
  ("controllers.awp", "interval"),
  ("controllers.awp", "levels"),
  ("controllers.awp", "window"),
  ("controllers.bandwidth", "level_bytes"),
  ("controllers.bandwidth", "decay"),
  ("controllers.bandwidth", "patience"),
  ("controllers.bandwidth", "history_size"),
  ("controllers.error_budget", "budget"),
  ("controllers.error_budget", "levels"),
  ("controllers.error_budget", "growth"),
  ("controllers.error_budget", "patience"),
  ("controllers.error_budget", "history_size"),
  ("controllers.fixed", "at"),
  ("controllers.Groups", "names"),
  ("controllers.Groups", "of_leaf"),
  ("controllers.Groups.merge", "parts"),
  ("controllers.group_by", "params"),
  ("controllers.group_by", "rules"),
  ("controllers.group_norms", "params"),
  ("controllers.group_norms", "groups"),
  ("controllers.level_changes", "history"),
  ("controllers.awp.init", "signal"),
  ("controllers.awp.update", "signal"),
  ("controllers.awp.update", "state"),
  ("controllers.awp.level", "state"),
  ("controllers.bandwidth.init", "signal"),
  ("controllers.bandwidth.update", "signal"),
  ("controllers.bandwidth.update", "state"),
  ("controllers.bandwidth.level", "state"),
  ("controllers.error_budget.init", "signal"),
  ("controllers.error_budget.update", "signal"),
  ("controllers.error_budget.update", "state"),
  ("controllers.error_budget.level", "state"),
  ("controllers.fixed.init", "signal"),
  ("controllers.fixed.update", "signal"),
  ("controllers.fixed.update", "state"),
  ("controllers.fixed.level", "state"),
}
