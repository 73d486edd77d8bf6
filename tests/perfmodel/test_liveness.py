"""Bytes that are alive at once, where compilers make arrays early."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.perfmodel import predict_cost

LAYERS, ROWS, WIDTH = 6, 512, 512
ARRAY = 4 * ROWS * WIDTH


def like(*shape):
  return jax.ShapeDtypeStruct(shape, "float32")


def stack_rows(x, carry):
  """Runs a loop that stacks an array as large as `x`."""
  return lax.scan(lambda c, row: (c, jnp.sin(row + c)), carry, x)[1]


def count_peak(fn, *args):
  return predict_cost(fn, *args).peak_bytes


def test_stacks_of_equal_loops_are_alive_from_the_first_loop_on():
  """They begin as zeros, which a compiler makes for all loops at once."""

  def run(x, shapes):
    for shape in shapes:
      x = stack_rows(x.reshape(shape), 1.0)
    return x.sum()

  equal = [(ROWS, WIDTH)] * LAYERS
  unequal = [(ROWS >> i, WIDTH << i) for i in range(LAYERS)]
  x = like(ROWS, WIDTH)
  apart = count_peak(functools.partial(run, shapes=unequal), x)
  together = count_peak(functools.partial(run, shapes=equal), x)
  # The argument and two stacks; the argument and all stacks.
  assert 3 * ARRAY <= apart < 4 * ARRAY
  assert (1 + LAYERS) * ARRAY <= together < (2 + LAYERS) * ARRAY


def test_carries_that_begin_as_a_constant_are_alive_from_the_first_loop_on():
  def run(x, scale):
    def add(total, _):
      return total + jnp.sin(x), None

    total = 0.0
    for i in range(LAYERS):
      # A carry that begins as an array needs no constant.
      first = jnp.zeros_like(x) if scale is None else x * (scale + i)
      total += lax.scan(add, first, length=3)[0].sum()
    return total

  x = like(ROWS, WIDTH)
  early = count_peak(functools.partial(run, scale=None), x)
  late = count_peak(functools.partial(run, scale=2.0), x)
  assert early - late >= (LAYERS - 2) * ARRAY


def drop_layers(x, key, wrap):
  for i in range(LAYERS):
    x = wrap(drop_layer)(x, jax.random.fold_in(key, i))
  return x.sum()


def drop_layer(x, key):
  keep = jax.random.bernoulli(key, 0.5, x.shape)
  return jnp.where(keep, x @ x, 0) @ jnp.where(keep, x, 1.0)


def tie_key(layer):
  return lambda x, key: layer(*lax.optimization_barrier((x, key)))


def test_masks_of_all_layers_are_alive_unless_a_barrier_gives_an_order():
  """Random bits are written nowhere; masks, which two kernels read, are."""
  x, key = like(ROWS, WIDTH), jax.eval_shape(lambda: jax.random.key(0))
  early, ordered = (
    count_peak(functools.partial(drop_layers, wrap=wrap), x, key)
    for wrap in (lambda layer: layer, tie_key)
  )
  # The argument, a mask, and what a product reads and writes.
  assert ordered <= 4.3 * ARRAY
  masks = (LAYERS - 1) * ROWS * WIDTH
  assert ordered + 0.9 * masks <= early <= ordered + 1.1 * masks


def test_masks_that_a_checkpoint_draws_again_wait_for_the_backward_pass():
  x, key = like(ROWS, WIDTH), jax.eval_shape(lambda: jax.random.key(0))

  def loss(x, key, prevent_cse):
    wrap = functools.partial(jax.checkpoint, prevent_cse=prevent_cse)
    return drop_layers(x, key, wrap)

  ordered, early = (
    count_peak(jax.grad(functools.partial(loss, prevent_cse=flag)), x, key)
    for flag in (True, False)
  )
  assert early - ordered >= (LAYERS - 2) * ROWS * WIDTH


def test_what_a_barrier_returns_is_in_memory_and_what_it_follows_from_is_not():
  """The bits of a mask are kept for later, not the array behind them."""

  def run(x, w):
    y = x @ w
    bits = jnp.packbits(y > 0)
    z = (y @ w).sum()
    bits, z = lax.optimization_barrier((bits, z))
    rows, columns = jnp.arange(2.0 * ROWS) * z, jnp.arange(4.0 * WIDTH)
    big = jnp.sin(jnp.outer(rows, columns))
    total = (big @ big.T).sum()
    return total + (jnp.unpackbits(bits) * 3.0).sum()

  x, w = like(ROWS, WIDTH), like(WIDTH, WIDTH)
  # Two arguments; the outer product (8) and its square (4).
  assert count_peak(run, x, w) < (2 + 8 + 4 + 0.5) * ARRAY
