"""Calls of the checks of codecs and transforms."""

import jax
import numpy as np
import optax

from jaxmotion import codecs, transforms
from tests.arguments.calls import Call

MESH = jax.sharding.Mesh(jax.devices()[:2], ("data",))
X = np.linspace(-1, 1, 64, dtype=np.float32)
CAST = codecs.cast("bfloat16")

CALLS = {
  "testing.check_codec": Call(CAST, X, bound=lambda x: np.abs(x) / 100),
  "testing.check_contraction": Call(CAST, X, 0.5),
  "testing.check_idempotent": Call(CAST, X),
  "testing.check_round_trips": Call(CAST, [X]),
  "testing.check_unbiased": Call(
    codecs.uniform(bits=8, rounding="stochastic"), X, samples=4
  ),
  "testing.check_transform": Call(
    optax.chain(transforms.exchange("data", CAST), optax.sgd(0.1)),
    MESH,
    {"w": np.ones((4, 4), np.float32)},
    steps=1,
  ),
}
UNCALLED = {}
ACCEPTED = {}
KNOWN_BAD = {
  ("testing.check_codec", "codec"),
  ("testing.check_codec", "x"),
  ("testing.check_codec", "bound"),
  ("testing.check_codec", "ulps"),
  ("testing.check_contraction", "codec"),
  ("testing.check_contraction", "x"),
  ("testing.check_contraction", "delta"),
  ("testing.check_idempotent", "codec"),
  ("testing.check_idempotent", "x"),
  ("testing.check_round_trips", "codec"),
  ("testing.check_round_trips", "arrays"),
  ("testing.check_round_trips", "bound"),
  ("testing.check_unbiased", "codec"),
  ("testing.check_unbiased", "x"),
  ("testing.check_unbiased", "samples"),
  ("testing.check_unbiased", "sigmas"),
  ("testing.check_transform", "tx"),
  ("testing.check_transform", "mesh"),
  ("testing.check_transform", "params"),
  ("testing.check_transform", "steps"),
}
