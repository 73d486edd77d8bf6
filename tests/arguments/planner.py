"""Calls of the planner."""

import functools

import jax
import jax.numpy as jnp

from jaxmotion import codecs, planner
from jaxmotion.perfmodel import builtin_platform
from tests.arguments.calls import Call, Lazy

PLATFORM = builtin_platform("ethernet_1gbit")
W = jax.ShapeDtypeStruct((64, 64), "float32")
X = jax.ShapeDtypeStruct((8, 64), "float32")


def loss(w, x):
  return jnp.mean(jnp.tanh(x @ w) ** 2)


@functools.cache
def plan():
  return planner.advise(loss, W, (X,), PLATFORM)


CALLS = {
  "planner.advise": Call(loss, W, (X,), PLATFORM, mesh_axis="data"),
  "planner.replan": Call(
    Lazy(plan), compute_s=1e-4, coding_s=1e-5, link_s=1e-3, step_s=None
  ),
  "planner.format_codec": Call(codecs.sign()),
  "planner.fit_memory": Call(
    loss, W, (X,), PLATFORM, 1e6, measure_memory=lambda fn, *args: 0
  ),
  "planner.program_memory_bytes": Call(loss, W, X),
}
_RECORD = "a record that a function of the room returns"
UNCALLED = {"planner.ExchangePlan": _RECORD, "planner.MemoryPlan*": _RECORD}
ACCEPTED = {
  ("planner.advise", "accuracy_budget"): {"zero": "nothing may be lost"},
  ("planner.advise", "candidates"): {"empty": "full precision alone"},
  ("planner.fit_memory", "options"): {"empty": "everything is kept"},
}
