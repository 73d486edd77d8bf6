"""Calls of the metrics of optimizer states."""

import jax
import numpy as np

from jaxmotion import checkpoint, codecs, transforms
from tests.arguments.calls import Call, Lazy

MESH = jax.sharding.Mesh(jax.devices()[:2], ("data",))
PARAMS = {"w": np.zeros((4, 1), np.float32)}
TX = transforms.exchange("data", codecs.feedback(codecs.uniform(bits=8)))
LAYOUT = Lazy(lambda: checkpoint.describe_state(TX, PARAMS, MESH))


def make_state():
  like = jax.eval_shape(lambda: transforms.init_state(TX, PARAMS, MESH))
  return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), like)


CALLS = {
  "monitor.metrics": Call(
    Lazy(make_state), LAYOUT, level=np.int32(0), traced=True
  ),
}
UNCALLED = {}
ACCEPTED = {}
KNOWN_BAD = set()
