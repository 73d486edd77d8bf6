"""Calls of the presets."""

import jax
import numpy as np
import optax

from tests.arguments.calls import Call

MESH = jax.sharding.Mesh(np.array(jax.devices()[:2])[None], ("host", "device"))


def loss_fn(params, batch):
  return (batch @ params).mean()


CALLS = {
  "presets.demo": Call(
    "host", 0.1, weight_decay=0.1, nonfinite="skip", local_axis="device"
  ),
  "presets.sparse_loco": Call(
    "host", 0.1, weight_decay=0.1, nonfinite="skip", local_axis="device"
  ),
  "presets.power_sgd": Call(
    "host", rank=2, start=3, nonfinite="skip", seed=1, local_axis="device"
  ),
  "presets.sdp4bit": Call(
    "host",
    optax.sgd(0.1),
    local_axis="device",
    nonfinite="skip",
    specs=jax.P(),
    seed=1,
  ),
  "presets.zeropp": Call(loss_fn, optax.sgd(0.1), MESH),
}
UNCALLED = {}
_LATER = {"misspelt": "no mesh is known here; a step names the axis"}
_RATE = {
  "zero": "nothing is learned, as in optax",
  "huge": "as in optax",
  "tracer": "optax.inject_hyperparams gives one",
}
ACCEPTED = {
  ("*", "axis_name"): _LATER,
  ("*", "local_axis"): _LATER,
  ("*", "learning_rate"): _RATE | {"fraction": "any number is a rate"},
  ("*", "weight_decay"): _RATE,
  ("presets.power_sgd", "start"): {"zero": "factors from the first update"},
}
KNOWN_BAD = set()
