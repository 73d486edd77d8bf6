import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.core import trace_in_place
from jaxmotion.hosts import write_apart

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def clip_positive(x):
  return jnp.where(x > 0, jnp.clip(x, 0.25, 0.5), 0)


def list_operations(fn, *args):
  return {eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).eqns}


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, lambda f: f])
def test_the_values_are_the_same(wrap):
  found = wrap(trace_in_place(clip_positive))(X)
  np.testing.assert_array_equal(found, clip_positive(X))


def test_no_function_is_traced_inside():
  assert "jit" in list_operations(clip_positive, X)
  assert "jit" not in list_operations(trace_in_place(clip_positive), X)


def test_trees_of_arrays_are_found():
  first = trace_in_place(lambda tree: clip_positive(tree["x"][0]))
  assert "jit" not in list_operations(lambda x: first({"x": [x]}), X)


def test_functions_that_follow_are_jitted_again():
  both = lambda x: clip_positive(trace_in_place(clip_positive)(x))
  assert "jit" in list_operations(both, X)


def test_what_is_written_apart_stays_a_call():
  twice = trace_in_place(lambda x: write_apart(clip_positive, x) - x)
  text = jax.jit(lambda x: x - twice(x)).lower(X).compile().as_text()
  assert text.count(" call(") == 1
