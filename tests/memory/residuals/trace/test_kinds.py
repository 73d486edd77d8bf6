"""Kinds of values, seen through the residuals that are chosen."""

import jax
import jax.numpy as jnp
import pytest

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals, offload, residuals_of
from tests.memory.residuals.nets import distance

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
  grad = jax.grad(compress_residuals(loss, INT4), argnums=(0, 1))
  expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(W, X)
  assert distance(expected, jax.jit(grad)(W, X)) < 0.5


def test_codecs_that_keep_small_elements_encode_divisors():
  loss = LOSSES["log"]
  for codec in (codecs.cast("bfloat16"), codecs.nonnegative()):
    (saved,) = residuals_of(loss, W, X, codec=codec)
    assert saved.codec == codec
  (saved,) = residuals_of(loss, W, X, codec=offload(INT4))
  assert saved.on_host and saved.codec is None
