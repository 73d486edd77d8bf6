import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from jaxmotion.program import (
  _primitives,
  is_discontinuous,
  is_expensive,
  is_float_equality,
  writes_in_place,
)

X = jnp.ones((4, 4))
# Nobody asks more about them than whether they are cheap.
UNCLASSIFIED = set(
  """
  after_all approx_top_k cholesky conv_general_dilated create_token custom_lin
  custom_linear_solve dot_general eig eigh fft gather get hessenberg
  householder_product lu qr ragged_all_to_all random_gamma rng_bit_generator
  rng_uniform schur sort svd swap top_k triangular_solve tridiagonal
  tridiagonal_solve
  """.split()
)


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
  classes = [c for c in vars(_primitives).values() if isinstance(c, frozenset)]
  known = UNCLASSIFIED.union(_primitives.COLLECTIVES, *classes)
  assert {n for n in names - known if not writes_in_place(n)} == set()


def test_what_a_scatter_changes_is_where_it_was():
  assert writes_in_place("scatter-add") and not writes_in_place("gather")


def test_one_pass_alone_is_cheap_to_compute_again():
  for fn in (jnp.exp, lambda x: x + 1, lambda x: x.T, jax.nn.relu):
    assert not is_expensive(equation(fn, X))
  product = lambda x: x @ x
  # What the table does not know is expensive.
  unknown = lambda x: jax.pure_callback(lambda x: x, x, x)
  inside = lambda x: jax.jit(product)(x)
  for fn in (product, jnp.sum, jnp.sort, unknown, inside):
    assert is_expensive(equation(fn, X))


def test_comparisons_are_discontinuous_and_of_floats_exact():
  assert is_discontinuous(equation(lambda x: x > 0, X))
  assert not is_discontinuous(equation(jnp.exp, X))
  assert is_float_equality(equation(lambda x: x == 0, X))
  assert not is_float_equality(equation(lambda x: x == 0, X.astype(int)))
  # No rounding makes a value infinite or NaN.
  for fn in (lambda x: x == jnp.inf, lambda x: -jnp.inf != x, lambda x: x != x):
    eqn = equation(fn, X)
    assert not is_float_equality(eqn) and not is_discontinuous(eqn)
