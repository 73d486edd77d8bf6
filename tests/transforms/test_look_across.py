import jax
import jax.numpy as jnp
import pytest

from jaxmotion.transforms._shard_layout import find_across

X = jnp.ones((4, 3))


def branch(x):
  return jax.lax.cond(x.shape[0] > 2, jnp.cumsum, lambda a: a, x[:, 0])


def branch_by_sum(x):
  return jax.lax.cond(x.sum() > 0, lambda a: a, lambda a: 2 * a, x)


def loop(x):
  return jax.lax.scan(lambda c, a: (c, a / jnp.linalg.norm(a)), 0.0, x)[1]


def loop_until(x):
  return jax.lax.while_loop(lambda a: a.sum() < 9, lambda a: a + 1, x)


def loop_by_carry(x):
  # Each row is scaled by the norm of the row before.
  return jax.lax.scan(lambda c, a: (jnp.linalg.norm(a), c * a), 1.0, x)[1]


def loop_beside(x):
  def body(state):
    counts, a = state
    return counts + counts.sum(), 2 * a

  return jax.lax.while_loop(lambda s: s[0].sum() < 9, body, (jnp.ones(2), x))[1]


ACROSS = {
  "mean": lambda x: x - x.mean(),
  "matmul": lambda x: x @ x.T,
  "sort": lambda x: jnp.sort(x, 0),
  "branch": branch,
  "branch by sum": branch_by_sum,
  "loop": loop,
  "loop by carry": loop_by_carry,
  "loop until": loop_until,
  "jitted": jax.jit(lambda x: x / x.max()),
}
APART = {
  "scaled": lambda x: 2 * jnp.sqrt(x) + x,
  "branch": lambda x: jax.lax.cond(True, lambda a: a, lambda a: 2 * a, x),
  "loop": lambda x: jax.lax.scan(lambda c, a: (c, 2 * a), 0.0, x)[1],
  "loop beside": loop_beside,
  "unused": lambda x: (x.sum(), 2 * x)[1],
  "barrier": lambda x: jax.lax.optimization_barrier((x.sum(), x))[1],
  "table": lambda x: jnp.arange(9.0)[x.astype(int)],
}


@pytest.mark.parametrize("name", ACROSS)
def test_what_combines_elements_of_a_part_is_found(name):
  assert find_across(ACROSS[name], (X,), [True], "data")
  assert not find_across(ACROSS[name], (X,), [False], "data")


@pytest.mark.parametrize("name", APART)
def test_what_treats_elements_by_themselves_is_not(name):
  assert not find_across(APART[name], (X,), [True], "data")


def test_a_sum_over_the_workers_is_no_parts_own():
  def scaled(x):
    return x / jax.lax.psum(x.sum(), "data")

  found = []

  def program(x):
    found.append(find_across(scaled, (x,), [True], "data"))
    return x

  jax.eval_shape(jax.vmap(program, axis_name="data"), X[None])
  assert found == [""]
