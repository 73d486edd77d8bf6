import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmotion.memory.residuals.trace._max_pool import max_pool

CASES = {
  "halves": ((1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4, (2, 8, 8, 3)),
  "overlapping": (
    (1, 3, 3, 1),
    (1, 2, 2, 1),
    ((0, 0), (1, 1), (0, 1), (0, 0)),
    (2, 9, 8, 3),
  ),
  "stride_one": (
    (1, 3, 3, 1),
    (1, 1, 1, 1),
    ((0, 0), (1, 1), (1, 1), (0, 0)),
    (2, 5, 7, 3),
  ),
  "skipping_elements": ((2, 1), (3, 2), ((0, 0), (0, 0)), (11, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_its_gradient_is_that_of_reduce_window(case):
  window, strides, padding, shape = CASES[case]
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape).astype(np.float32)

  def plain(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

  def ours(x):
    return max_pool(x, window, strides, padding)

  def with_gradient(fn):
    def run(x, ct):
      y, pull = jax.vjp(fn, x)
      return y, pull(ct)[0]

    return jax.jit(run)

  ct = rng.normal(size=jax.eval_shape(plain, x).shape).astype(np.float32)
  expected, found = with_gradient(plain), with_gradient(ours)
  tied = np.maximum(np.round(x), 0)
  wild = np.where(rng.random(shape) < 0.3, np.nan, tied).astype(np.float32)
  wild[rng.random(shape) < 0.3] = -np.inf
  for operand in (x, tied, wild, np.full_like(x, -np.inf)):
    for a, b in zip(expected(operand, ct), found(operand, ct), strict=True):
      np.testing.assert_array_equal(a, b)


def test_it_saves_two_bits_for_a_window_of_four():
  x = jnp.zeros((1, 64, 64, 8))
  args = (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4
  _, pull = jax.eval_shape(
    lambda x: jax.vjp(lambda x: max_pool(x, *args), x), x
  )
  windows = 32 * 32 * 8
  saved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pull))
  assert saved == windows * 2 / 8


def test_its_gradient_does_not_depend_on_fusion():
  # With the argmax found by equality with the maximum, XLA:CPU computed the
  # two in separate fusions here, and some windows had no argmax.
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 75, 75, 8))
  kernel = 0.2 * rng.normal(size=(3, 3, 8, 8))

  def loss(x, pool):
    convolve = functools.partial(
      lax.conv_general_dilated,
      rhs=kernel,
      padding="SAME",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    y = convolve(x, window_strides=(1, 1))
    mean, var = (f(y, (0, 1, 2), keepdims=True) for f in (jnp.mean, jnp.var))
    y = (y - mean) * lax.rsqrt(var + 1e-3)
    y = jax.nn.relu(1.1 * y + 0.1)
    z = pool(y, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.sin(z).sum() + jnp.sin(convolve(y, window_strides=(2, 2))).sum()

  def plain(y, *window):
    return lax.reduce_window(y, -jnp.inf, lax.max, *window)

  with jax.enable_x64(True):
    expected, ours = (
      jax.jit(jax.grad(functools.partial(loss, pool=pool)))(x)
      for pool in (plain, max_pool)
    )
  np.testing.assert_allclose(ours, expected, atol=1e-12)
