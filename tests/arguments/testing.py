"""Calls of the checks of codecs and transforms."""

import jax
import numpy as np
import optax

from jaxmotion import codecs, transforms
from tests.arguments.calls import Call, Lazy

MESH = jax.sharding.Mesh(jax.devices()[:2], ("data",))
X = np.linspace(-1, 1, 64, dtype=np.float32)
CAST = codecs.cast("bfloat16")

CALLS = {
  "testing.check_codec": Call(CAST, X),
  "testing.check_round_trips": Call(CAST, [X]),
  "testing.check_unbiased": Call(
    codecs.uniform(bits=8, rounding="stochastic"), X, samples=4
  ),
  "testing.check_rounds": Call(
    codecs.low_rank(rank=1), X.reshape(2, 4, 8), steps=1
  ),
  "testing.find_breaches": Call(CAST, X[None]),
  "testing.make_rows": Call(Lazy(lambda: np.asarray(X))),
  "testing.check_transform": Call(
    optax.chain(transforms.exchange("data", CAST), optax.sgd(0.1)),
    MESH,
    {"w": np.ones((4, 4), np.float32)},
    steps=1,
  ),
}
CALLS["testing.check_sharded"] = Call(
  optax.sgd(0.1), MESH, {"w": np.ones((16, 8), np.float32)}, steps=1
)
UNCALLED = {}
ACCEPTED = {
  ("testing.check_round_trips", "arrays"): {"empty": "nothing to check"},
  ("testing.check_unbiased", "sigmas"): {"huge": "nothing is asked for"},
}
KNOWN_BAD = set()
