"""Calls of the checks of codecs and transforms."""

import jax
import numpy as np
import optax

from jaxmotion import codecs, transforms
from tests.arguments.calls import Call, Lazy

X = np.linspace(-1, 1, 64, dtype=np.float32)
CAST = codecs.cast("bfloat16")
GIVEN = {
  "codec": CAST,
  "x": X,
  "arrays": [X],
  "rows": X[None],
  "mesh": jax.sharding.Mesh(jax.devices()[:2], ("data",)),
  "params": {"w": np.ones((16, 8), np.float32)},
  "steps": 1,
}
CALLS = {
  "testing.check_unbiased": Call(
    codecs.uniform(bits=8, rounding="stochastic"), samples=4
  ),
  "testing.check_rounds": Call(codecs.low_rank(rank=1), X.reshape(2, 4, 8)),
  "testing.make_rows": Call(Lazy(lambda: np.asarray(X))),
  "testing.check_transform": Call(
    optax.chain(transforms.exchange("data", CAST), optax.sgd(0.1))
  ),
  "testing.check_sharded": Call(optax.sgd(0.1)),
}
ACCEPTED = {
  ("testing.check_round_trips", "arrays"): {"empty": "nothing to check"},
  ("testing.check_unbiased", "sigmas"): {"huge": "nothing is asked for"},
}
