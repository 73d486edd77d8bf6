"""Calls of the memory savings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import codecs, memory, perfmodel
from tests.arguments.calls import Call, Lazy

INT8 = codecs.uniform(bits=8)
W = np.ones((4, 4), np.float32)
X = np.ones((2, 4), np.float32)
BATCH = {"x": X, "y": X}


def loss(w, x):
  return jnp.mean(jnp.tanh(x @ w) ** 2)


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def layer(w, x):
  return jnp.tanh(x @ w)


def distance(x, y):
  return jnp.mean((x - y) ** 2)


H100 = perfmodel.builtin_platform("h100_node").device
HOST = memory.HostResident(loss_fn, optax.sgd(0.1), min_leaf_size=0)
BACKWARD = memory.OptimizerInBackward([(layer, 2)], distance, optax.sgd(0.1))
COMPRESSED = memory.compress_state(optax.lion(0.1), min_leaf_size=0)
PARAMS = {"w": W}
STACKED = np.ones((2, 4, 4), np.float32)


RULES = ((".*", INT8),)
compressed_state = Lazy(
  functools.cache(lambda: COMPRESSED.init({"w": jnp.ones((4, 4))}))
)
GIVEN = {
  "codec": INT8,
  "device": H100,
  "rules": RULES,
  "learning_rate": 0.1,
  "tx": optax.sgd(0.1),
  "params": PARAMS,
}
CALLS = {
  "memory.calibrate_zero_value": Call(
    lambda w, x: jnp.sum(jnp.sin(jax.nn.relu(x @ w))), [(W, X)], params=0
  ),
  "memory.compress_residuals": Call(loss, params=0, memory_budget=0.0),
  "memory.compress_residuals -> fn": Call(
    W, X, on=memory.compress_residuals(loss, INT8)
  ),
  "memory.residuals_of": Call(loss, W, X, params=0, memory_budget=0.5),
  "memory.save_only_these_names": Call("hidden"),
  "memory.save_and_offload_only_these_names": Call(
    names_which_can_be_saved=["a"], names_which_can_be_offloaded=["b"]
  ),
  "memory.adamw_8bit": Call(mask={"w": True}, memory_kind="pinned_host"),
  "memory.compress_state": Call(optax.adam(0.1)),
  "memory.compress_state -> init": Call(on=COMPRESSED.init),
  "memory.compress_state -> update": Call(
    PARAMS, compressed_state, on=COMPRESSED.update
  ),
  "memory.decompress_state": Call(compressed_state, traced=True),
  "memory.OptimizerInBackward": Call([(layer, 2)], distance, segment=1),
  "memory.OptimizerInBackward.init": Call([STACKED], on=BACKWARD.init),
  "memory.OptimizerInBackward.step": Call(
    [STACKED],
    Lazy(functools.cache(lambda: BACKWARD.init([jnp.asarray(STACKED)]))),
    X,
    X,
    on=BACKWARD.step,
  ),
  "memory.HostResident": Call(
    [("loss", loss_fn)], groups=[(".*", "all")], device=jax.devices()[0]
  ),
}
for _method in """
  init place_state step groups_of norms errors device_bytes plain_bytes
  """.split():
  _given = {
    "params": PARAMS,
    "state": Lazy(lambda: HOST.init({"w": jnp.ones((4, 4))})),
    "batch": BATCH,
    "level": 0,
    "measure_memory": lambda fn, *args: 0,
  }
  CALLS[f"memory.HostResident.{_method}"] = Call(
    on=getattr(HOST, _method), given=_given, traced=False
  )
UNCALLED = {
  "memory.EncodedLeaf": "a record that `compress_state` makes",
  "memory.HostState": "a record that `HostResident` makes",
}
_ANY_SIZE = {"zero": "every leaf", "huge": "no leaf"}
_NO_RULES = {"empty": "no rules: all as without"}
_NO_PARAMS = {"empty": "no argument is always live"}
BUDGETS = {
  "zero": "recomputes everything",
  "huge": "bytes that everything fits in",
}
ACCEPTED = {
  **{
    (f"memory.{name}", "memory_budget"): BUDGETS
    for name in ("compress_residuals", "residuals_of")
  },
  ("memory.calibrate_zero_value", "params"): _NO_PARAMS,
  ("memory.compress_residuals", "codec"): _NO_RULES,
  ("memory.compress_residuals", "params"): {
    **_NO_PARAMS,
    "huge": "compared with the arguments of the call",
  },
  ("memory.compress_residuals", "static_argnums"): {
    "minus_one": "the last argument",
    "zero": "the first argument",
    "empty": "no argument",
  },
  ("memory.save_only_these_names", "names"): {
    "misspelt": "no residuals are known here"
  },
  ("memory.residuals_of", "codec"): _NO_RULES,
  ("memory.residuals_of", "params"): _NO_PARAMS,
  ("memory.compress_state", "rules"): _NO_RULES,
  ("memory.adamw_8bit", "learning_rate"): {
    **dict.fromkeys(("zero", "huge", "fraction"), "any step"),
    "class": "a schedule is any callable",
  },
  **{
    ("memory.adamw_8bit", name): dict.fromkeys(("zero", "huge"), "any number")
    for name in ("b1", "b2", "eps", "weight_decay")
  },
  ("memory.adamw_8bit", "mask"): {
    "empty": "no leaf decays",
    "true": "all leaves decay",
    "class": "any callable",
  },
  ("memory.adamw_8bit", "rules"): _NO_RULES,
  ("memory.adamw_8bit", "min_leaf_size"): _ANY_SIZE,
  ("memory.compress_state", "min_leaf_size"): _ANY_SIZE,
  ("memory.decompress_state", "state"): {"wrapped": "a tree that holds one"},
  ("memory.OptimizerInBackward", "codec"): _NO_RULES,
  ("memory.OptimizerInBackward", "segment"): {"huge": "one segment"},
  ("memory.HostResident", "groups"): _NO_RULES,
  ("memory.HostResident", "min_leaf_size"): _ANY_SIZE,
}
# Arrays that the library hands to the caller's own function, which refuses
# them.
KNOWN_BAD = {
  ("memory.compress_residuals -> fn", "w"),
  ("memory.compress_residuals -> fn", "x"),
  ("memory.residuals_of", "args"),
  ("memory.OptimizerInBackward.step", "x"),
  ("memory.OptimizerInBackward.step", "batch"),
  ("memory.HostResident.step", "batch"),
  ("memory.HostResident.device_bytes", "params"),
  ("memory.HostResident.device_bytes", "batch"),
}
