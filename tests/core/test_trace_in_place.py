import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.core import trace_in_place, trace_once
from jaxmotion.hosts import write_apart

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


def clip_positive(x):
  return jnp.where(x > 0, jnp.clip(x, 0.25, 0.5), 0)


def has_call(fn):
  eqns = jax.make_jaxpr(fn)(X).eqns
  return "jit" in {eqn.primitive.name for eqn in eqns}


def test_the_values_are_those_of_calls_but_no_call_is_traced():
  first = trace_in_place(lambda tree: clip_positive(tree["x"][0]))
  in_place = lambda x: first({"x": [x]})
  assert has_call(clip_positive) and not has_call(in_place)
  # Functions that follow are jitted again.
  assert has_call(lambda x: clip_positive(in_place(x)))
  for wrap in (jax.jit, jax.vmap, lambda f: f):
    np.testing.assert_array_equal(wrap(in_place)(X), clip_positive(X))


def test_what_is_written_apart_stays_a_call():
  twice = trace_in_place(lambda x: write_apart(clip_positive, x) - x)
  text = jax.jit(lambda x: x - twice(x)).lower(X).compile().as_text()
  assert text.count(" call(") == 1


def test_a_function_is_traced_once_and_leaves_no_call():
  shapes = []
  double = trace_once(lambda x: shapes.append(x.shape) or x * 2)
  run = lambda x: double(x) + double(x) + double(x[:2]).sum()
  assert "call @" not in jax.jit(run).lower(X).as_text()
  np.testing.assert_array_equal(jax.jit(run)(X), run(X))
  assert shapes == [X.shape, (2, 8)]
