"""Calls of what continues states on other workers."""

import functools

import jax
import numpy as np

from jaxmotion import checkpoint, codecs, transforms
from tests.arguments.calls import Call, Lazy

MESH = jax.sharding.Mesh(jax.devices()[:2], ("data",))
PARAMS = {"w": np.zeros((4, 1), np.float32)}
TX = transforms.exchange("data", codecs.feedback(codecs.uniform(bits=8)))
LAYOUT = Lazy(
  functools.cache(lambda: checkpoint.describe_state(TX, PARAMS, MESH))
)


@functools.cache
def make_state():
  like = jax.eval_shape(lambda: transforms.bind_mesh(TX, MESH).init(PARAMS))
  return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), like)


GIVEN = {
  "tx": TX,
  "state": Lazy(make_state),
  "params": PARAMS,
  "layout": LAYOUT,
  "mesh": MESH,
}
CALLS = {
  "checkpoint.resize": Call(traced=True),
  "checkpoint.Layout.from_dict": Call(
    Lazy(lambda: LAYOUT.make().to_dict()), on=checkpoint.Layout.from_dict
  ),
}
UNCALLED = {"checkpoint.extend.make_transformation": "it reads a layout"}
ACCEPTED = {
  ("checkpoint.resize", "lost"): {"empty": "nobody may be lost"},
  ("checkpoint.check_workers", "state"): dict.fromkeys(
    ("wrapped", "reshaped"), "any tree may hold per-worker state"
  ),
}
