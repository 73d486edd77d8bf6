import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.core import vjp_inexact


def test_integer_arguments_are_held_fixed():
  x, n = jnp.arange(3.0), jnp.arange(3)

  def fn(n, x, y):
    return [n * x * y, n + 1], {"note": x.sum()}

  outs, pull, notes = vjp_inexact(fn, n, x, 2 * x)
  (product, counts), note = outs, notes["note"]
  assert counts.dtype == n.dtype and float(note) == 3
  ct = np.zeros(3, jax.dtypes.float0)
  dx, dy = pull([jnp.ones(3), ct])
  np.testing.assert_array_equal(product, n * x * 2 * x)
  np.testing.assert_array_equal(dx, n * 2 * x)
  np.testing.assert_array_equal(dy, n * x)
