import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmotion.memory.residuals._pool import max_pool

CASES = {
  "halves": ((1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4, (2, 8, 8, 3)),
  "overlapping": (
    (1, 3, 3, 1),
    (1, 2, 2, 1),
    ((0, 0), (1, 1), (0, 1), (0, 0)),
    (2, 9, 8, 3),
  ),
  "touching_every_value": (
    (1, 3, 3, 1),
    (1, 1, 1, 1),
    ((0, 0), (1, 1), (1, 1), (0, 0)),
    (2, 5, 7, 3),
  ),
  "leaving_values_out": ((2, 1), (3, 2), ((0, 0), (0, 0)), (11, 6)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ties", [False, True])
def test_its_gradient_is_that_of_reduce_window(case, ties):
  window, strides, padding, shape = CASES[case]
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape).astype(np.float32)
  if ties:
    x = np.maximum(np.round(x), 0)

  def plain(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

  y, pull = jax.vjp(plain, x)
  z, pull_again = jax.vjp(lambda x: max_pool(x, window, strides, padding), x)
  ct = rng.normal(size=y.shape).astype(np.float32)
  np.testing.assert_array_equal(y, z)
  np.testing.assert_array_equal(pull(ct)[0], pull_again(ct)[0])


def test_it_keeps_two_bits_for_a_window_of_four():
  x = jnp.zeros((1, 64, 64, 8))
  args = (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4
  kept = jax.eval_shape(lambda x: jax.vjp(lambda x: max_pool(x, *args), x), x)[
    1
  ]
  places = 32 * 32 * 8
  assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(kept)) == (
    places * 2 / 8
  )
