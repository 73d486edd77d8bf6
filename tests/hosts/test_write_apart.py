import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.hosts import write_apart

X = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_result_is_that_of_a_call_on_trees_too(wrap):
  twice = wrap(lambda t: write_apart(lambda t: {"y": t["x"] * 2}, t))
  np.testing.assert_array_equal(twice({"x": X})["y"], X * 2)


def test_it_can_be_vmapped_and_closes_over_arrays():
  scale = jnp.arange(64.0)
  f = lambda x, s: write_apart(lambda x: x * s + scale[0], x)
  np.testing.assert_array_equal(jax.vmap(f)(X, scale), X * scale[:, None])


def test_its_reader_finds_the_value_in_memory():
  def count_calls(compute):
    f = jax.jit(lambda p, x: p - compute(lambda x: jnp.where(x > 0, x, 1), x))
    return f.lower(X, X).compile().as_text().count(" call(")

  # The call of `jnp.where` inside is inlined.
  assert count_calls(lambda fn, x: fn(x)) == 0
  assert count_calls(write_apart) == 1
