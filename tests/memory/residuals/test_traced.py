import jax
import jax.numpy as jnp

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


def test_a_loop_keeps_the_gradient_of_its_carry():
  """XLA takes more memory for a loop of which nothing reads a result."""

  def loss(p, x):
    def layer(x, w):
      return jnp.tanh(x @ w), None

    return jnp.sum(jax.lax.scan(layer, x, p)[0] ** 2)

  p, x = jnp.ones((3, 8, 8)), jnp.ones((4, 8))

  def count_tied(argnums):
    gradient = jax.grad(compress_residuals(loss), argnums)
    steps = jax.make_jaxpr(gradient)(p, x).eqns
    barriers = [s for s in steps if s.primitive.name == "optimization_barrier"]
    return len(barriers[-1].invars)

  assert count_tied(0) == count_tied((0, 1))


def test_outputs_that_nothing_is_derived_from_have_zero_cotangents():
  block, p, x = make("mlp")
  ours = compress_residuals(lambda p, x: (squared(block)(p, x), block(p, x)))
  found = jax.jit(jax.grad(ours, has_aux=True))(p, x)[0]
  exact = jax.jit(jax.grad(squared(block)))(p, x)
  assert distance(exact, found) < 1e-6


def test_no_tracer_outlives_the_trace():
  block, p, x = make("mlp")
  with jax.checking_leaks():
    jax.make_jaxpr(jax.grad(compress_residuals(squared(block))))(p, x)
