"""Calls of the collectives, on two workers (or two hosts of two devices)."""

import numpy as np
from jax.sharding import PartitionSpec

from jaxmotion import HostAxes, codecs, make_key
from tests.arguments.calls import Call, Lazy

X = np.ones((8, 32), np.float32)
TREE = {"w": X, "b": np.ones(4, np.float32)}
INT8 = codecs.uniform(bits=8)
INT4 = codecs.uniform(bits=4)
DATA, HOSTS = ["data"], ["host", "device"]

GIVEN = {
  "x": X,
  "axis_name": "data",
  "codec": INT8,
  "backward": INT8,
  "local_codec": INT8,
  "key": Lazy(lambda: make_key(0)),
  "level": np.int32(0),
}
CALLS = {
  "collectives.all_gather": Call(mesh=DATA),
  "collectives.all_gather_init": Call(mesh=DATA),
  "collectives.all_to_all": Call(mesh=DATA),
  "collectives.reduce_scatter": Call(mesh=DATA),
  "collectives.reduce_scatter_init": Call(mesh=DATA),
  "collectives.all_reduce": Call(
    TREE, HostAxes(*HOSTS), (INT4, INT8), weight=1.0, mesh=HOSTS
  ),
  "collectives.all_reduce_init": Call(TREE, mesh=DATA),
  "collectives.max_over_workers": Call(mesh=DATA, varying=["level"]),
  "collectives.permute": Call(pairs=[(0, 1)], mesh=DATA),
  "collectives.unshard": Call(
    X,
    HostAxes(*HOSTS),
    INT8,
    INT8,
    error=np.zeros((16, 32), np.float32),
    spec=PartitionSpec(),
    mesh=HOSTS,
    varying=["x", "error"],
  ),
  "collectives.all_gather_planes": Call(TREE, mesh=DATA),
  "collectives.broadcast_planes": Call(TREE, mesh=DATA),
}
UNCALLED = {"collectives.extend.*": "public functions check what they give it"}
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
