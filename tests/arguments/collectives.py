"""Calls of the collectives, on two workers (or two hosts of two devices)."""

import numpy as np
from jax.sharding import PartitionSpec

from jaxmotion import HostAxes, codecs, make_key
from tests.arguments.calls import Call, Lazy

X = np.ones((8, 32), np.float32)
TREE = {"w": X, "b": np.ones(4, np.float32)}
INT8 = codecs.uniform(bits=8)
LEVELS = (codecs.uniform(bits=4), INT8)
KEY = Lazy(lambda: make_key(0))
DATA, HOSTS = ["data"], ["host", "device"]
AXES = HostAxes(*HOSTS)

CALLS = {
  "collectives.all_reduce": Call(
    TREE,
    AXES,
    LEVELS,
    key=KEY,
    weight=1.0,
    level=np.int32(0),
    local_codec=INT8,
    mesh=HOSTS,
  ),
  "collectives.all_reduce_init": Call(TREE, "data", INT8, mesh=DATA),
  "collectives.max_over_workers": Call(
    np.int32(0), "data", mesh=DATA, varying=["level"]
  ),
  "collectives.all_gather": Call(X, "data", INT8, key=KEY, mesh=DATA),
  "collectives.all_gather_init": Call(X, "data", INT8, mesh=DATA),
  "collectives.all_to_all": Call(
    X, "data", INT8, backward=INT8, key=KEY, mesh=DATA
  ),
  "collectives.permute": Call(
    X, "data", [(0, 1)], INT8, backward=INT8, key=KEY, mesh=DATA
  ),
  "collectives.reduce_scatter": Call(X, "data", INT8, key=KEY, mesh=DATA),
  "collectives.reduce_scatter_init": Call(X, "data", INT8, mesh=DATA),
  "collectives.unshard": Call(
    X,
    AXES,
    INT8,
    INT8,
    error=np.zeros((16, 32), np.float32),
    key=KEY,
    local_codec=INT8,
    spec=PartitionSpec(),
    mesh=HOSTS,
    varying=["x", "error"],
  ),
  "collectives.all_gather_planes": Call(TREE, "data", np.int32(0), mesh=DATA),
  "collectives.broadcast_planes": Call(TREE, "data", np.int32(0), mesh=DATA),
}
UNCALLED = {
  "collectives.extend.*": "internal: public functions check what they give it"
}
UNBOUND = {"misspelt": "no axis has to be bound for codecs without state"}
FROM_END = {"minus_one": "it counts from the end"}
ANY_COUNT = {"huge": "a count has no greatest value"}
ACCEPTED = {
  ("collectives.all_reduce_init", "axis_name"): UNBOUND,
  ("*", "axis"): FROM_END,
  ("*", "split_axis"): FROM_END,
  ("*", "concat_axis"): FROM_END,
  ("*", "workers"): ANY_COUNT,
}
KNOWN_BAD = set()
