"""Calls of the presets."""

import optax

from jaxmotion import HostAxes, codecs
from tests.arguments.calls import Call

CALLS = {
  "presets.demo": Call("host", 0.1, weight_decay=0.1, nonfinite="skip"),
  "presets.diloco": Call(optax.sgd(0.1), codec=codecs.sign(), axis_name="host"),
  "presets.streaming_diloco": Call(optax.sgd(0.1), axis_name="host"),
  "presets.muloco": Call(0.1, axis_name="host"),
  "presets.dgc": Call("host", density=0.1, clip_norm=1.0, nonfinite="skip"),
  "presets.ef21_sgdm": Call(
    "host",
    codec=codecs.sign(),
    momentum=0.5,
    nonfinite="skip",
  ),
  "presets.lion": Call("host", 0.1, weight_decay=0.1, nonfinite="skip"),
  "presets.onebit_adam": Call(
    "host",
    0.1,
    weight_decay=0.1,
    codec=codecs.onebit(),
    nonfinite="skip",
  ),
  "presets.signum": Call("host", 0.1, weight_decay=0.1, nonfinite="skip"),
  "presets.sparse_loco": Call("host", 0.1, weight_decay=0.1, nonfinite="skip"),
  "presets.power_sgd": Call("host", rank=2, start=3, nonfinite="skip", seed=1),
  "presets.sdp4bit": Call(
    HostAxes("host", "device"),
    optax.sgd(0.1),
    nonfinite="skip",
    seed=1,
  ),
  "presets.zeropp": Call(optax.sgd(0.1), nonfinite="skip"),
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
KNOWN_BAD = set()
