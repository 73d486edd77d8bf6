import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import primitives

from jaxmotion.program import (
  is_classified,
  is_discontinuous,
  is_expensive,
  is_float_equality,
)

X = jnp.ones((4, 4))


def equation(fn, *args):
  """The last equation of a function."""
  return jax.make_jaxpr(fn)(*args).jaxpr.eqns[-1]


def test_every_public_primitive_of_this_jax_is_in_the_table():
  names = {
    getattr(primitives, name).name
    for name in dir(primitives)
    if name.endswith("_p")
  }
  assert len(names) > 100
  assert {name for name in names if not is_classified(name)} == set()


@pytest.mark.parametrize(
  "fn", [jnp.exp, lambda x: x + 1, lambda x: x.T, jax.nn.relu]
)
def test_one_pass_is_cheap_to_compute_again(fn):
  assert not is_expensive(equation(fn, X))


@pytest.mark.parametrize(
  "fn", [lambda x: x @ x, jnp.sum, jnp.sort, lambda x: jax.jit(jnp.dot)(x, x)]
)
def test_what_reads_much_is_expensive(fn):
  assert is_expensive(equation(fn, X))


def test_what_the_table_does_not_know_is_expensive():
  def callback(x):
    return jax.pure_callback(lambda x: x, x, x)

  assert is_expensive(equation(callback, X))


def test_comparisons_are_discontinuous_and_of_floats_exact():
  assert is_discontinuous(equation(lambda x: x > 0, X))
  assert not is_discontinuous(equation(jnp.exp, X))
  assert is_float_equality(equation(lambda x: x == 0, X))
  assert not is_float_equality(equation(lambda x: x == 0, X.astype(int)))


@pytest.mark.parametrize(
  "fn", [lambda x: x == jnp.inf, lambda x: -jnp.inf != x, lambda x: x != x]
)
def test_no_rounding_makes_a_value_infinite_or_nan(fn):
  eqn = equation(fn, X)
  assert not is_float_equality(eqn)
  assert not is_discontinuous(eqn)
