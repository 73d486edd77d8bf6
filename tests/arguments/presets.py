"""Calls of the presets."""

import optax

from jaxmotion import HostAxes, codecs
from tests.arguments.calls import Call

TX = optax.sgd(0.1)
GIVEN = {
  "axis_name": "host",
  "learning_rate": 0.1,
  "weight_decay": 0.1,
  "nonfinite": "skip",
  "seed": 1,
  "inner": TX,
  "tx": TX,
}
CALLS = {
  "presets.diloco": Call(codec=codecs.sign()),
  "presets.dgc": Call(density=0.1),
  "presets.ef21_sgdm": Call(codec=codecs.sign(), momentum=0.5),
  "presets.onebit_adam": Call(codec=codecs.onebit()),
  "presets.power_sgd": Call(rank=2, start=3),
  "presets.sdp4bit": Call(HostAxes("host", "device")),
  "presets.zeropp": Call(nonfinite="skip"),
}
_LATER = {"misspelt": "no mesh is known here; a step names the axis"}
_RATE = {
  "zero": "nothing is learned, as in optax",
  "huge": "as in optax",
  "tracer": "optax.inject_hyperparams gives one",
}
ACCEPTED = {
  ("*", "axis_name"): _LATER,
  ("*", "learning_rate"): _RATE | {"fraction": "any number is a rate"},
  ("*", "weight_decay"): _RATE,
  ("*", "momentum"): {"zero": "no momentum"},
  ("*", "outer_momentum"): {"zero": "no momentum"},
  ("*", "outer_rate"): {"huge": "as in optax"},
  ("presets.streaming_diloco", "delay"): {"zero": "lands at once"},
  ("presets.streaming_diloco", "mix"): {"zero": "nothing of a worker's own"},
  ("*", "b1"): {"zero": "no momentum in the update"},
  ("*", "b2"): {"zero": "moments are those of the last gradient"},
  ("presets.onebit_adam", "eps"): {"huge": "as in optax"},
  ("presets.dgc", "clip_norm"): {"huge": "clips nothing"},
  ("presets.dgc", "warmup"): {"zero": "no warm-up"},
  ("presets.ef21_sgdm", "start"): {"zero": "begins from zero"},
  ("*", "min_size"): {
    "zero": "leaves of any size",
    "huge": "no leaf is so large",
  },
  ("presets.power_sgd", "start"): {"zero": "factors from the first update"},
}
