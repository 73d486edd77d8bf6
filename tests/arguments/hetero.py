"""Calls of the training of workers with unequal speeds."""

import numpy as np

from jaxmotion import hetero
from tests.arguments.calls import Call

SPEEDS, COUNTS = (1.0, 2.0), (2, 1)
BALANCE = hetero.rebalance(total=6, workers=2)

CALLS = {
  "hetero.assign_microbatches": Call(
    np.arange(6.0), COUNTS, microbatch=2, max_microbatches=4
  ),
  "hetero.rebalance": Call(total=6, workers=2, caps=(4, 4)),
  "hetero.rebalance.init": Call(SPEEDS, on=BALANCE.init),
  "hetero.rebalance.update": Call(
    (0.1, 0.2), BALANCE.init(), on=BALANCE.update
  ),
  "hetero.rebalance.speeds": Call(BALANCE.init(), on=BALANCE.speeds),
  "hetero.fit_speed": Call((1, 2), (0.1, 0.2)),
  "hetero.ideal_shares": Call(6, SPEEDS, caps=(4, 4)),
  "hetero.integer_shares": Call(6, SPEEDS, caps=(4, 4)),
  "hetero.makespan_s": Call(COUNTS, SPEEDS),
}
UNCALLED = {}
ACCEPTED = {
  ("*", "fixed_s"): {"zero": "nothing else takes time", "huge": "any time"},
  ("hetero.rebalance.update", "state"): {"reshaped": "plain numbers stay"},
  ("hetero.rebalance.speeds", "state"): {"reshaped": "plain numbers stay"},
  ("*", "total"): {"zero": "no work, no shares"},
  ("hetero.rebalance", "min_microbatches"): {"zero": "a worker may rest"},
}
KNOWN_BAD = set()
