"""Calls of the presets."""

import jax
import numpy as np
import optax

from tests.arguments.calls import Call

MESH = jax.sharding.Mesh(np.array(jax.devices()[:2])[None], ("host", "device"))


def loss_fn(params, batch):
  return (batch @ params).mean()


CALLS = {
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
ACCEPTED = {
  ("presets.power_sgd", "axis_name"): _LATER,
  ("presets.power_sgd", "local_axis"): _LATER,
  ("presets.power_sgd", "start"): {"zero": "factors from the first update"},
  ("presets.sdp4bit", "axis_name"): _LATER,
  ("presets.sdp4bit", "local_axis"): _LATER,
}
KNOWN_BAD = set()
