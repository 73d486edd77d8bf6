"""Traced programs: both passes, kinds of values, packed bits, max pooling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals, offload, residuals_of
from jaxmotion.memory.residuals.trace import trace_joint
from jaxmotion.memory.residuals.trace._codes import (
  Window,
  max_pool,
  pack_codes,
  unpack_codes,
)
from jaxmotion.program import evaluate, read_operand
from tests.memory.residuals.nets import distance, gradients


def test_integer_arguments_are_held_fixed():
  x, n = jnp.arange(3.0), jnp.arange(3)
  ct = jnp.full(3, 2.0)

  def fn(n, x, y):
    return [n * x * y, n + 1], {"note": x.sum()}

  args = (n, x, 2 * x)
  outs = [jax.typeof(y) for y in fn(*args)[0]]
  joint = trace_joint(fn, args, outs)
  of_n, of_x, of_y = joint.gradients
  assert of_n is None and len(joint.cotangents) == 1
  env = dict(joint.program.constants)
  env.update(zip(joint.program.inputs, (*args, ct), strict=True))
  evaluate(joint.program.steps, env)
  product, counts = (read_operand(env, v) for v in joint.outputs)
  np.testing.assert_array_equal(product, n * x * 2 * x)
  np.testing.assert_array_equal(counts, n + 1)
  assert float(read_operand(env, joint.diagnostics["note"])) == 3
  np.testing.assert_array_equal(read_operand(env, of_x), ct * n * 2 * x)
  np.testing.assert_array_equal(read_operand(env, of_y), ct * n * x)


W = jnp.full((64,), 0.5)
# One large element of a block: those beside it are rounded to zero.
X = jnp.full((32, 64), 0.01).at[:, 0].set(8.0)
INT4 = codecs.uniform(bits=4, block=64)
LOSSES = {
  "log": lambda w, x: jnp.sum(jnp.log(x * w[None])),
  "root": lambda w, x: jnp.sum(jnp.sqrt(jnp.square(x) * w[None])),
  "quotient": lambda w, x: jnp.sum(jnp.sin(w[None]) / jnp.exp(x) / (x * 2)),
  "power": lambda w, x: jnp.sum(w[None] * x**-1.5),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_gradient_divides_by_is_not_rounded_to_zero(name):
  loss = LOSSES[name]
  both = loss, compress_residuals(loss, INT4)
  expected, found = (gradients(fn, W, X)[1] for fn in both)
  assert distance(expected, found) < 0.5


def test_codecs_that_keep_small_elements_encode_divisors():
  loss = LOSSES["log"]
  for codec in (codecs.cast("bfloat16"), codecs.nonnegative()):
    (saved,) = residuals_of(loss, W, X, codec=codec)
    assert saved.codec == codec
  (saved,) = residuals_of(loss, W, X, codec=offload(INT4))
  assert saved.on_host and saved.codec is None


@pytest.mark.parametrize(
  ("bits", "shape"), [(1, (4, 3, 64)), (2, (5, 4, 8)), (4, (7, 5)), (8, (1,))]
)
def test_codes_round_trip_through_the_fewest_words(bits, shape):
  codes = np.random.default_rng(0).integers(0, 2**bits, shape, np.uint32)

  @jax.jit
  def run(codes):
    words = pack_codes(codes, bits)
    return words, unpack_codes(words, bits, shape)

  words, found = run(codes)
  assert words.dtype == jnp.uint32
  assert words.size == -(-codes.size * bits // 32)
  np.testing.assert_array_equal(found, codes)


# Window, strides, padding, shape, and bits of a position in the window.
_PADS = ((0, 0), (1, 1), (0, 1), (0, 0))
CASES = {
  "halves": ((1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4, (2, 8, 8, 3), 2),
  "overlapping": ((1, 3, 3, 1), (1, 2, 2, 1), _PADS, (2, 9, 8, 3), 4),
  "stride_one": ((1, 3, 3, 1), (1, 1, 1, 1), _PADS, (2, 5, 7, 3), 4),
  "skipping_elements": ((2, 1), (3, 2), ((0, 0), (0, 0)), (11, 6), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_its_gradient_is_that_of_reduce_window(case):
  window, strides, padding, shape, bits = CASES[case]
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape).astype(np.float32)

  def plain(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

  def ours(x):
    return max_pool(x, Window(window, strides, padding))

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
    both = expected(operand, ct), found(operand, ct)
    jax.tree.map(np.testing.assert_array_equal, *both)
  _, pull = jax.eval_shape(lambda x: jax.vjp(ours, x), x)
  saved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pull))
  assert saved == 4 * -(-ct.size * bits // 32)


@pytest.mark.optimized
def test_its_gradient_does_not_depend_on_fusion():
  # With the argmax found by equality with the maximum, XLA:CPU computed the
  # two in separate fusions here, and some windows had no argmax.
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 75, 75, 8))
  kernel = 0.2 * rng.normal(size=(3, 3, 8, 8))

  pads = ((0, 0), (1, 1), (1, 1), (0, 0))
  window = Window((1, 3, 3, 1), (1, 2, 2, 1), pads)

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
    z = pool(y, window)
    return jnp.sin(z).sum() + jnp.sin(convolve(y, window_strides=(2, 2))).sum()

  def plain(y, window):
    return lax.reduce_window(y, -jnp.inf, lax.max, *window)

  with jax.enable_x64(True):
    expected, ours = (
      jax.jit(jax.grad(functools.partial(loss, pool=pool)))(x)
      for pool in (plain, max_pool)
    )
  np.testing.assert_allclose(ours, expected, atol=1e-12)
