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
PLAIN = perfmodel.platform_to_dict(PLATFORM)
CPU2 = f"{ROOT}/jaxmotion/perfmodel/cpu2.json"
INT8 = codecs.uniform(bits=8)


def loss(*trees):
  """Takes whatever has arrays: what it is given is checked before."""
  leaves = jax.tree.leaves(trees)
  return sum(jnp.sum(jnp.asarray(a, jnp.float32)) for a in leaves)


@functools.cache
def step_cost():
  return perfmodel.trace_step(loss, W, (X,))


@functools.cache
def cost():
  return perfmodel.predict_cost(loss, W, X)


CALLS = {
  "perfmodel.predict_cost": Call(loss, W, X, while_trips=1, backend="cpu"),
  "perfmodel.Axis": Call(name="data", workers=8, link=LINK),
  "perfmodel.Curve": Call(sizes=(1.0, 2.0), seconds=(1.0, 2.0), noise=0.1),
  "perfmodel.Curve.covers": Call(1.5, on=CURVE.covers),
  "perfmodel.Curve.seconds_at": Call(1.5, on=CURVE.seconds_at),
  "perfmodel.Device": Call(
    name="example",
    matmul_flops_per_s={"float32": 1e12},
    vector_flops_per_s=1e11,
    memory_rate=perfmodel.gbyte_per_s(50),
    memory_bytes=16e9,
    kernel_s=1e-6,
    measured={"elementwise": CURVE},
  ),
  "perfmodel.Link": Call(
    latency_s=5e-5,
    rate=perfmodel.gbit_per_s(1),
    efficiency={"all_gather": 0.5},
    measured={"all_gather 8": CURVE},
  ),
  "perfmodel.Link.transfer_seconds": Call(1e6, on=LINK.transfer_seconds),
  "perfmodel.Platform": Call(
    name="example",
    device=DEVICE,
    to_host=LINK,
    from_host=LINK,
    axes=(AXIS,),
    sources={"to_host.rate": "a datasheet"},
  ),
  "perfmodel.Platform.axis": Call("data", on=PLATFORM.axis),
  "perfmodel.Platform.resize": Call(data=4, on=PLATFORM.resize),
  "perfmodel.Rate": Call(bytes_per_s=1e9),
  "perfmodel.builtin_platform": Call("cpu2"),
  "perfmodel.gbit_per_s": Call(1.0),
  "perfmodel.gbyte_per_s": Call(1.0),
  "perfmodel.platform_from_dict": Call(PLAIN),
  "perfmodel.platform_to_dict": Call(PLATFORM),
  "perfmodel.save_platform": Call(PLATFORM, "/dev/null"),
  "perfmodel.load_platform": Call(CPU2),
  "perfmodel.collective_seconds": Call("all_reduce", 1e6, 8, LINK),
  "perfmodel.collective_traffic": Call("all_reduce", 1e6, 8),
  "perfmodel.exchange_ledger": Call(W, PLATFORM, "data", INT8, method="gather"),
  "perfmodel.ledger_seconds": Call(LEDGER, PLATFORM),
  "perfmodel.predict_exchange": Call(W, PLATFORM, "data", INT8),
  "perfmodel.predict_seconds": Call(Lazy(cost), DEVICE),
  "perfmodel.predict_step": Call(
    Lazy(step_cost),
    PLATFORM,
    "data",
    INT8,
    bucket_bytes=1000,
    base_step_s=1.0,
  ),
  "perfmodel.trace_step": Call(loss, W, (X,), optimizer=optax.sgd(0.1)),
  "perfmodel.uncalibrated": Call(PLATFORM, Lazy(cost), LEDGER),
}
_UNCHECKED = "the planner calls it with what is checked, thousands of times"
_RECORD = "a record that a function of the room returns"
UNCALLED = {
  "perfmodel.Cost": _RECORD,
  "perfmodel.StepCost": _RECORD,
  "perfmodel.StepPrediction": _RECORD,
  "perfmodel.Curve.fit_line": "it has no arguments",
  "perfmodel.Platform.figure_paths": "it has no arguments",
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
KNOWN_BAD = set()
