"""States of some numbers of workers, filled and resized."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxmotion import checkpoint, core
from jaxmotion.transforms.extend import trace_state


def make_mesh(workers):
  return Mesh(np.array(jax.devices()[:workers]), ("data",))


def mesh_of(workers):
  """A mesh without devices."""
  return AbstractMesh((workers,), ("data",))


ONE = mesh_of(1)


def saved_like(tx, params, workers):
  """The layout of a state, and its shapes."""
  layout = checkpoint.describe_state(tx, params, mesh_of(workers))
  return layout, checkpoint.saved_like(tx, params, layout, make_mesh(1))


# Halves, then uneven parts: two workers and three.
COUNTS = (4, 2, 3)


def fill_randomly(tree, seed=0):
  """Gives every float of a tree a random value, and counts the value 1."""
  rng = np.random.default_rng(seed)

  def fill(a):
    if jnp.issubdtype(a.dtype, jnp.floating):
      return rng.normal(size=a.shape).astype(a.dtype)
    return np.ones(a.shape, a.dtype)

  return jax.tree.map(fill, tree)


def draw_gradients(params, workers, rng):
  """Gradients of all workers, whose means differ."""
  return {
    k: rng.normal(size=(workers, *a.shape)).astype(np.float32)
    + np.arange(workers, dtype=np.float32).reshape(-1, *[1] * a.ndim)
    for k, a in params.items()
  }


def fill_state(tx, params):
  """A state of as many workers as `COUNTS` begins with, of random values."""
  return fill_randomly(saved_like(tx, params, COUNTS[0])[1])


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def resize_all(tx, state, params, counts=COUNTS, into=None):
  """The states for each number of workers, one after another."""
  states, into = [state], into or tx
  for old, new in itertools.pairwise(counts):
    layout = checkpoint.describe_state(tx, params, mesh_of(old))
    state = checkpoint.resize(into, state, params, layout, mesh_of(new))
    assert core.same_shapes(
      state, trace_state(into, params, mesh_of(new), "data")
    )
    states.append(state)
  return states
