"""Gradients that the reference implementations got, and runs of presets."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxmotion
from tests.meshes import mesh_of

SHAPES = {"a": (12, 20), "b": (20,), "c": (16, 8), "d": (9,)}
PARAMS = {k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()}
MESH = mesh_of(4)


def gradients(step):
  """Gradients of all workers, as the references got them."""
  rngs = [np.random.default_rng(1000 * step + r) for r in range(4)]
  each = [
    {k: g.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    for g in rngs
  ]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


def pick(tree):
  """Returns a matrix and a vector of a tree, which compile faster than all."""
  return {k: tree[k] for k in "ab"}


def flatten(tree):
  return np.concatenate([np.asarray(tree[k]).reshape(-1) for k in SHAPES])


def make_run(tx, params=None, mesh=MESH):
  """Returns the state of a transformation, and its compiled update."""
  params = PARAMS if params is None else params
  state = jaxmotion.bind_mesh(tx, mesh).init(params)
  specs = jaxmotion.state_specs(state, "data")
  update = jax.shard_map(
    lambda g, s, p: tx.update(jax.tree.map(lambda a: a[0], g), s, p),
    mesh=mesh,
    in_specs=(P("data"), specs, P()),
    out_specs=(P(), specs),
  )
  jitted = jax.jit(update)
  return state, lambda g, s, p=params: jitted(g, s, p)
