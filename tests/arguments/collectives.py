"""Calls of the collectives, on two workers (or two hosts of two devices)."""

import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, make_key
from jaxmotion.codecs.extend import partition
from tests.arguments.calls import Call, Lazy

X = np.ones((8, 32), np.float32)
TREE = {"w": X, "b": np.ones(4, np.float32)}
INT8 = codecs.uniform(bits=8)
LEVELS = (codecs.uniform(bits=4), INT8)
KEY = Lazy(lambda: make_key(0))
DATA, HOSTS = ["data"], ["host", "device"]

CALLS = {
  "collectives.all_reduce": Call(
    TREE, "data", INT8, key=KEY, weight=1.0, mesh=DATA
  ),
  "collectives.all_reduce_init": Call(TREE, "data", INT8, mesh=DATA),
  "collectives.all_reduce_adaptive": Call(
    TREE, "data", LEVELS, np.int32(0), op="sum", method="gather", mesh=DATA
  ),
  "collectives.all_reduce_adaptive_init": Call(TREE, "data", LEVELS, mesh=DATA),
  "collectives.max_over_workers": Call(
    np.int32(0), "data", mesh=DATA, varying=["level"]
  ),
  "collectives.all_gather": Call(X, "data", INT8, key=KEY, mesh=DATA),
  "collectives.all_gather_init": Call(X, "data", INT8, mesh=DATA),
  "collectives.all_to_all": Call(X, "data", INT8, key=KEY, mesh=DATA),
  "collectives.all_to_all_init": Call(X, "data", INT8, mesh=DATA),
  "collectives.reduce_scatter": Call(X, "data", INT8, key=KEY, mesh=DATA),
  "collectives.reduce_scatter_init": Call(X, "data", INT8, mesh=DATA),
  "collectives.all_gather_planes": Call(TREE, "data", np.int32(0), mesh=DATA),
  "collectives.broadcast_planes": Call(TREE, "data", np.int32(0), mesh=DATA),
  "collectives.all_reduce_hierarchical": Call(
    TREE, "host", "device", INT8, key=KEY, weight=1.0, mesh=HOSTS
  ),
  "collectives.all_reduce_hierarchical_init": Call(
    TREE, "host", "device", INT8, mesh=HOSTS
  ),
  "collectives.extend.check_level": Call(
    np.int32(0), 2, "data", mesh=DATA, varying=[]
  ),
  "collectives.extend.joint_axes": Call("host", "device"),
  "collectives.extend.choose_methods": Call(
    Lazy(lambda: partition(INT8, {"w": jnp.zeros((8, 32))})), 4, None
  ),
  "collectives.extend.is_sharded": Call(X, 2),
  "collectives.extend.row_like": Call(X, 2),
  "collectives.extend.shard_like": Call(X, 2),
  "collectives.extend.all_finite": Call(
    TREE, "data", mesh=DATA, varying=["tree"]
  ),
  "collectives.extend.apply_nonfinite_policy": Call(
    "skip", TREE, "data", mesh=DATA
  ),
  "collectives.extend.keep_update": Call(
    np.bool_(True), TREE, TREE, TREE, mesh=DATA
  ),
  "collectives.extend.gather_payloads": Call(
    [TREE], "data", mesh=DATA, varying=["payloads"]
  ),
}
UNCALLED = {"collectives.extend.check_*": "it is a check of arguments itself"}
ACCEPTED = {}
KNOWN_BAD = {
  ("collectives.all_reduce", "x"),
  ("collectives.all_reduce", "axis_name"),
  ("collectives.all_reduce", "codec"),
  ("collectives.all_reduce", "state"),
  ("collectives.all_reduce", "key"),
  ("collectives.all_reduce_init", "x"),
  ("collectives.all_reduce_init", "axis_name"),
  ("collectives.all_reduce_init", "codec"),
  ("collectives.all_reduce_init", "method"),
  ("collectives.all_reduce_adaptive", "x"),
  ("collectives.all_reduce_adaptive", "axis_name"),
  ("collectives.all_reduce_adaptive", "level"),
  ("collectives.all_reduce_adaptive", "state"),
  ("collectives.all_reduce_adaptive_init", "x"),
  ("collectives.all_reduce_adaptive_init", "axis_name"),
  ("collectives.all_reduce_adaptive_init", "method"),
  ("collectives.max_over_workers", "level"),
  ("collectives.max_over_workers", "axis_name"),
  ("collectives.all_gather", "x"),
  ("collectives.all_gather", "axis_name"),
  ("collectives.all_gather", "state"),
  ("collectives.all_gather", "key"),
  ("collectives.all_gather", "axis"),
  ("collectives.all_gather", "tiled"),
  ("collectives.all_gather_init", "x"),
  ("collectives.all_gather_init", "axis_name"),
  ("collectives.all_to_all", "x"),
  ("collectives.all_to_all", "axis_name"),
  ("collectives.all_to_all", "state"),
  ("collectives.all_to_all", "key"),
  ("collectives.all_to_all", "split_axis"),
  ("collectives.all_to_all", "concat_axis"),
  ("collectives.all_to_all_init", "x"),
  ("collectives.all_to_all_init", "axis_name"),
  ("collectives.all_to_all_init", "split_axis"),
  ("collectives.reduce_scatter", "x"),
  ("collectives.reduce_scatter", "axis_name"),
  ("collectives.reduce_scatter", "state"),
  ("collectives.reduce_scatter", "key"),
  ("collectives.reduce_scatter", "axis"),
  ("collectives.reduce_scatter_init", "x"),
  ("collectives.reduce_scatter_init", "axis_name"),
  ("collectives.reduce_scatter_init", "axis"),
  ("collectives.all_gather_planes", "x"),
  ("collectives.all_gather_planes", "axis_name"),
  ("collectives.all_gather_planes", "level"),
  ("collectives.all_gather_planes", "axis"),
  ("collectives.all_gather_planes", "tiled"),
  ("collectives.broadcast_planes", "x"),
  ("collectives.broadcast_planes", "axis_name"),
  ("collectives.broadcast_planes", "level"),
  ("collectives.all_reduce_hierarchical", "x"),
  ("collectives.all_reduce_hierarchical", "axis_name"),
  ("collectives.all_reduce_hierarchical", "local_axis"),
  ("collectives.all_reduce_hierarchical", "state"),
  ("collectives.all_reduce_hierarchical", "key"),
  ("collectives.all_reduce_hierarchical", "local_codec"),
  ("collectives.all_reduce_hierarchical_init", "x"),
  ("collectives.all_reduce_hierarchical_init", "axis_name"),
  ("collectives.all_reduce_hierarchical_init", "local_axis"),
  ("collectives.all_reduce_hierarchical_init", "codec"),
  ("collectives.all_reduce_hierarchical_init", "method"),
  ("collectives.extend.check_level", "level"),
  ("collectives.extend.check_level", "num_levels"),
  ("collectives.extend.check_level", "axis_name"),
  ("collectives.extend.joint_axes", "axis_name"),
  ("collectives.extend.joint_axes", "local_axis"),
  ("collectives.extend.choose_methods", "partition"),
  ("collectives.extend.choose_methods", "workers"),
  ("collectives.extend.choose_methods", "method"),
  ("collectives.extend.is_sharded", "like"),
  ("collectives.extend.is_sharded", "workers"),
  ("collectives.extend.row_like", "like"),
  ("collectives.extend.row_like", "workers"),
  ("collectives.extend.shard_like", "like"),
  ("collectives.extend.shard_like", "workers"),
  ("collectives.extend.all_finite", "tree"),
  ("collectives.extend.all_finite", "axis_name"),
  ("collectives.extend.apply_nonfinite_policy", "policy"),
  ("collectives.extend.apply_nonfinite_policy", "x"),
  ("collectives.extend.apply_nonfinite_policy", "axis_name"),
  ("collectives.extend.keep_update", "ok"),
  ("collectives.extend.keep_update", "updates"),
  ("collectives.extend.keep_update", "state"),
  ("collectives.extend.keep_update", "old_state"),
  ("collectives.extend.gather_payloads", "payloads"),
  ("collectives.extend.gather_payloads", "axis_name"),
}
