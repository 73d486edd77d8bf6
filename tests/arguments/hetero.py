"""Calls of the training of workers with unequal speeds."""

import numpy as np

from jaxmotion import hetero

BALANCE = hetero.rebalance(total=6, workers=2)
INSTANCES = {"rebalance": BALANCE}
GIVEN = {
  "batch": np.arange(6.0),
  "counts": (1, 2),
  "microbatch": 2,
  "max_microbatches": 4,
  "total": 6,
  "workers": 2,
  "caps": (4, 4),
  "speeds": (1.0, 2.0),
  "seconds": (0.1, 0.2),
  "state": BALANCE.init(),
}
ACCEPTED = {
  ("*", "fixed_s"): {"zero": "nothing else takes time", "huge": "any time"},
  ("hetero.rebalance.update", "state"): {"reshaped": "plain numbers stay"},
  ("hetero.rebalance.speeds", "state"): {"reshaped": "plain numbers stay"},
  ("*", "total"): {"zero": "no work, no shares"},
  ("hetero.rebalance", "min_microbatches"): {"zero": "a worker may rest"},
}
