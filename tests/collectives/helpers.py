"""Programs over real (emulated) workers."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.meshes import mesh_of

SPLIT, SAME = P("data"), P()


def bind(fn, workers, in_specs=SPLIT, out_specs=SAME):
  """A program that runs `fn` on each worker."""
  specs = dict(in_specs=in_specs, out_specs=out_specs)
  return jax.jit(jax.shard_map(fn, mesh=mesh_of(workers), **specs))


def over(fn, workers, out_specs=SAME):
  """A program that runs fn(x[worker]); x has a leading axis of workers."""
  local = lambda x: fn(jax.tree.map(lambda a: a[0], x))
  return bind(local, workers, out_specs=out_specs)


def run(fn, x, workers, out_specs=SAME):
  """Runs fn(x[worker]) on each worker; x has a leading axis of workers."""
  return over(fn, workers, out_specs)(x)


def copies(y):
  """The bits that each worker holds of a replicated array."""
  return {np.asarray(s.data).tobytes() for s in y.addressable_shards}
