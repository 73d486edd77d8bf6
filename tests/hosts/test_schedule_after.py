import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmotion.core import varying_axes
from jaxmotion.hosts import schedule_after
from tests.collectives.helpers import mesh

VALUES = np.array([-0.0, 1.0, np.nan, np.inf, 1e-42], np.float32)


@pytest.mark.parametrize("token", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "int32"])
def test_no_bit_changes_whatever_the_token(dtype, token):
  x = jnp.asarray(VALUES if "float" in dtype else range(5), dtype)
  y = jax.jit(schedule_after)(x, jnp.full((3, 2), token))
  assert y.dtype == x.dtype
  assert np.asarray(y).tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("token", ["uint8", "int32", "bfloat16", "float16"])
def test_a_token_may_have_any_dtype(token):
  y = jax.jit(schedule_after)(jnp.ones((2, 2)), jnp.ones(3, token))
  np.testing.assert_array_equal(y, 1)


def all_reduces(ordered):
  """All-reduces in a compiled program that sums two arrays over workers."""

  def f(x, y):
    a = lax.psum(x, "data")
    return a, lax.psum(schedule_after(y, a) if ordered else y, "data")

  specs = dict(in_specs=jax.P("data"), out_specs=jax.P())
  program = jax.jit(jax.shard_map(f, mesh=mesh(2), **specs))
  text = program.lower(jnp.ones((2, 8)), jnp.ones((2, 8))).compile().as_text()
  return text.count(" all-reduce(")


def test_ordered_sums_are_not_combined():
  assert all_reduces(ordered=False) == 1
  assert all_reduces(ordered=True) == 2


def test_the_type_is_that_of_the_value_and_not_of_the_token():
  seen = []

  def f(x, y):
    total = lax.psum(x, "data")
    seen.append(
      (
        varying_axes(schedule_after(total, y)),
        varying_axes(schedule_after(y, total)),
      )
    )
    return schedule_after(total, y)

  specs = dict(in_specs=jax.P("data"), out_specs=jax.P())
  jax.jit(jax.shard_map(f, mesh=mesh(2), **specs))(jnp.ones(4), jnp.ones(4))
  assert seen[0] == (frozenset(), frozenset({"data"}))


@pytest.mark.parametrize(("size", "token"), [(0, 3), (3, 0), (0, 0)])
def test_without_an_element_there_is_nothing_to_wait_for(size, token):
  y = jax.jit(schedule_after)(jnp.ones(size), jnp.ones(token))
  np.testing.assert_array_equal(y, np.ones(size))
