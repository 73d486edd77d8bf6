"""Calls of the training steps of Flax NNX."""

import jax.numpy as jnp
import optax
from flax import nnx

import jaxmotion.nnx
from jaxmotion import codecs
from tests.arguments.calls import Call, Lazy
from tests.arguments.memory import BUDGETS, H100, W
from tests.arguments.transforms import MESH, accept_options, loss_fn

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
  "nnx.parallelize_step": Call(
    MESH,
    batch=("batch",),
    mean=(nnx.Cache,),
    static_argnames=("train",),
    static_argnums=(3,),
    donate_argnames=("model",),
    donate_argnums=(1,),
  ),
  "nnx.flatten_state -> init": Call(on=FLAT.init),
  "nnx.flatten_state -> update": Call(
    {"w": W}, Lazy(lambda: FLAT.init({"w": jnp.asarray(W)})), on=FLAT.update
  ),
  "nnx.parallelize_step -> decorate": Call(
    loss_fn, on=jaxmotion.nnx.parallelize_step(MESH)
  ),
}
ACCEPTED = {
  **accept_options("nnx.parallelize_step"),
  ("nnx.compress_residuals", "memory_budget"): BUDGETS,
  ("nnx.compress_residuals", "codec"): {"empty": "no rules: all as without"},
  ("nnx.parallelize_step", "batch"): {"misspelt": "no step is known here"},
  ("nnx.flatten_state -> update", "state"): {
    "wrapped": "`nnx.Optimizer` hands over another container"
  },
  ("nnx.value_and_grad", "argnums"): {"huge": "no call is known here"},
  ("nnx.value_and_grad", "axis_name"): {"misspelt": "no mesh is known here"},
  ("nnx.parallelize_step", "mean"): {"empty": "nothing is averaged"},
}
