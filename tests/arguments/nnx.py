"""Calls of the functions for Flax NNX."""

import jax.numpy as jnp
import optax

import jaxmotion.nnx
from jaxmotion import codecs
from tests.arguments.calls import Call, Lazy
from tests.arguments.memory import BUDGETS, H100, W
from tests.arguments.transforms import loss_fn

FLAT = jaxmotion.nnx.flatten_state(optax.adam(0.1))
GIVEN = {
  "fn": loss_fn,
  "fun": loss_fn,
  "codec": codecs.uniform(bits=8),
  "memory_budget": 0.0,
  "device": H100,
  "tx": optax.adam(0.1),
  "params": {"w": W},
}
CALLS = {
  "nnx.flatten_state -> init": Call(on=FLAT.init),
  "nnx.flatten_state -> update": Call(
    {"w": W}, Lazy(lambda: FLAT.init({"w": jnp.asarray(W)})), on=FLAT.update
  ),
}
ACCEPTED = {
  ("nnx.compress_residuals", "memory_budget"): BUDGETS,
  ("nnx.compress_residuals", "codec"): {"empty": "no rules: all as without"},
  ("nnx.flatten_state -> update", "state"): {
    "wrapped": "`nnx.Optimizer` hands over another container"
  },
  ("nnx.value_and_grad", "argnums"): {"huge": "no call is known here"},
  ("nnx.value_and_grad", "axis_name"): {"misspelt": "no mesh is known here"},
}
