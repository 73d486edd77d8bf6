"""Calls of the performance model."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, perfmodel
from jaxmotion.wire import Ledger, Move
from tests.arguments.calls import Call, Lazy
from tests.paths import ROOT

PLATFORM = perfmodel.builtin_platform("ethernet_1gbit")
DEVICE, AXIS = PLATFORM.device, PLATFORM.axes[0]
LINK = AXIS.link
W = jax.ShapeDtypeStruct((16, 16), "float32")
X = jax.ShapeDtypeStruct((8, 16), "float32")
LEDGER = Ledger((Move("all_reduce", ("data",), 8, "float32", 1000, 1),))
CURVE = perfmodel.Curve(sizes=(1.0, 2.0), seconds=(1.0, 2.0), noise=0.1)
INT8 = codecs.uniform(bits=8)


def loss(*trees):
  """Takes whatever has arrays: what it is given is checked before."""
  leaves = jax.tree.leaves(trees)
  return sum(jnp.sum(jnp.asarray(a, jnp.float32)) for a in leaves)


INSTANCES = {"Curve": CURVE, "Link": LINK, "Platform": PLATFORM}
GIVEN = {
  "axes": (AXIS,),
  "bucket_bytes": 1000,
  "bytes_per_s": 1e9,
  "codec": INT8,
  "cost": Lazy(functools.cache(lambda: perfmodel.predict_cost(loss, W, X))),
  "device": DEVICE,
  "from_host": LINK,
  "gbit": 1.0,
  "gbyte": 1.0,
  "kernel_s": 1e-6,
  "latency_s": 5e-5,
  "ledger": LEDGER,
  "link": LINK,
  "matmul_flops_per_s": {"float32": 1e12},
  "memory_bytes": 16e9,
  "memory_rate": perfmodel.gbyte_per_s(50),
  "mesh_axis": "data",
  "name": "data",
  "nbytes": 1e6,
  "noise": 0.1,
  "op": "all_reduce",
  "payload_bytes": 1e6,
  "plain": perfmodel.platform_to_dict(PLATFORM),
  "platform": PLATFORM,
  "rate": perfmodel.gbit_per_s(1),
  "seconds": (1.0, 2.0),
  "size": 1.5,
  "sizes": (1.0, 2.0),
  "step_cost": Lazy(
    functools.cache(lambda: perfmodel.trace_step(loss, W, (X,)))
  ),
  "to_host": LINK,
  "tree": W,
  "vector_flops_per_s": 1e11,
  "workers": 8,
}
CALLS = {
  "perfmodel.predict_cost": Call(loss, W, X, while_trips=1, backend="cpu"),
  "perfmodel.Device": Call(measured={"elementwise": CURVE}),
  "perfmodel.Link": Call(
    efficiency={"all_gather": 0.5}, measured={"all_gather 8": CURVE}
  ),
  "perfmodel.Platform": Call(sources={"to_host.rate": "a datasheet"}),
  "perfmodel.Platform.resize": Call(given={}, data=4),
  "perfmodel.builtin_platform": Call("cpu2"),
  "perfmodel.save_platform": Call(path="/dev/null"),
  "perfmodel.load_platform": Call(f"{ROOT}/jaxmotion/perfmodel/cpu2.json"),
  "perfmodel.exchange_ledger": Call(method="gather"),
  "perfmodel.predict_step": Call(base_step_s=1.0),
  "perfmodel.trace_step": Call(loss, W, (X,), optimizer=optax.sgd(0.1)),
}
_UNCHECKED = "the planner calls it with what is checked, thousands of times"
_RECORD = "a record that a function of the room returns"
UNCALLED = {
  "perfmodel.Cost": _RECORD,
  "perfmodel.StepCost": _RECORD,
  "perfmodel.StepPrediction": _RECORD,
  "perfmodel.extend.*": _UNCHECKED,
}
_LARGE = {"huge": "the arithmetic holds for numbers of any size"}
_NOTHING = {"zero": "nothing to move takes no time", **_LARGE}
_TEXT = {"misspelt": "a name for reports"}
_TRIPS = {"zero": "a loop may never run", **_LARGE}
ACCEPTED = {
  ("*", "name"): _TEXT,
  ("*", "workers"): _LARGE,
  ("*", "bucket_bytes"): _LARGE,
  ("*", "payload_bytes"): _NOTHING,
  ("*", "size"): _NOTHING,
  ("*", "nbytes"): _NOTHING,
  ("*", "while_trips"): _TRIPS,
  ("perfmodel.Platform.resize", "data"): _LARGE,
  ("perfmodel.Rate", "bytes_per_s"): _LARGE,
  ("perfmodel.gbit_per_s", "gbit"): _LARGE,
  ("perfmodel.gbyte_per_s", "gbyte"): _LARGE,
  ("perfmodel.Link", "shared_by"): _LARGE,
  ("perfmodel.Link", "latency_s"): {"zero": "a link without latency"},
  ("perfmodel.Device", "kernel_s"): {"zero": "kernels start at once"},
  ("perfmodel.Device", "call_s"): {"zero": "programs start at once"},
  ("perfmodel.Curve", "noise"): {"zero": "repeats are equal", **_LARGE},
  ("perfmodel.Platform", "to_host"): {"none": "no link to a host"},
  ("perfmodel.Platform", "from_host"): {"none": "no link to a host"},
  ("perfmodel.Platform", "axes"): {"empty": "one device alone"},
  ("perfmodel.save_platform", "path"): {"misspelt": "a path like any other"},
  ("perfmodel.predict_step", "base_step_s"): _LARGE,
}
