import jax

from jaxmotion.memory import compress_residuals
from tests.memory.residuals.nets import distance, make, squared


def test_gradients_that_nothing_asks_for_are_not_computed():
  block, p, x = make("mlp")
  loss = squared(block)

  def count_products(fn, argnums):
    return str(jax.make_jaxpr(jax.grad(fn, argnums))(p, x)).count("dot_general")

  ours = compress_residuals(loss)
  for argnums in (0, (0, 1)):
    assert count_products(ours, argnums) == count_products(loss, argnums)
  assert count_products(loss, 0) < count_products(loss, (0, 1))


def test_outputs_that_nothing_is_derived_from_have_zero_cotangents():
  block, p, x = make("mlp")
  ours = compress_residuals(lambda p, x: (squared(block)(p, x), block(p, x)))
  found = jax.jit(jax.grad(ours, has_aux=True))(p, x)[0]
  exact = jax.jit(jax.grad(squared(block)))(p, x)
  assert distance(exact, found) < 1e-6
