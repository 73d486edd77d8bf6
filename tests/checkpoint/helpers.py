"""States of some numbers of workers, filled and resized."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jaxmotion import checkpoint, core
from jaxmotion.transforms.extend import trace_state
from tests.meshes import mesh_of


def abstract_mesh(workers):
  """A mesh without devices."""
  return AbstractMesh((workers,), ("data",))


ONE = abstract_mesh(1)


def describe(tx, params, workers):
  """The layout of a state, and its shapes; each is traced once."""
  shapes = tuple((name, a.shape) for name, a in params.items())
  return trace_once(tx, shapes, workers)


@functools.cache
def trace_once(tx, shapes, workers):
  mesh = abstract_mesh(workers)
  params = {name: np.zeros(shape, np.float32) for name, shape in shapes}
  layout = checkpoint.describe_state(tx, params, mesh)
  return layout, trace_state(tx, params, mesh, "data")


def saved_like(tx, params, workers):
  """The layout of a state, and its shapes on one device."""
  layout, _ = describe(tx, params, workers)
  return layout, checkpoint.saved_like(tx, params, layout, mesh_of(1))


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
    layout, _ = describe(tx, params, old)
    state = checkpoint.resize(into, state, params, layout, abstract_mesh(new))
    assert core.same_shapes(state, describe(into, params, new)[1])
    states.append(state)
  return states
