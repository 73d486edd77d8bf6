"""Calls of the training steps of Flax NNX."""

from flax import nnx

import jaxmotion.nnx
from tests.arguments.calls import Call
from tests.arguments.transforms import MESH, loss_fn

CALLS = {
  "nnx.parallelize_step": Call(
    MESH, batch=("batch",), mean=(nnx.Cache,), donate=True
  ),
  "nnx.parallelize_step -> decorate": Call(
    loss_fn, on=jaxmotion.nnx.parallelize_step(MESH)
  ),
}
UNCALLED = {}
ACCEPTED = {
  ("nnx.parallelize_step", "batch"): {"misspelt": "no step is known here"},
  ("nnx.parallelize_step", "mean"): {"empty": "nothing is averaged"},
}
KNOWN_BAD = set()
