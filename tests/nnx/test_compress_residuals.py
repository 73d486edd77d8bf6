"""`compress_residuals` of modules, beside `nnx.remat`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmotion import codecs
from jaxmotion.nnx import compress_residuals

WRAPPERS = {
  "remat": nnx.remat,
  "exact": compress_residuals,
  "int8": functools.partial(compress_residuals, codec=codecs.uniform(bits=8)),
}


class Block(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(32, 32, rngs=rngs)
    self.norm = nnx.BatchNorm(32, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


@functools.cache
def train(name):
  """Returns the losses, gradients and variables of two steps."""
  model, run = Block(nnx.Rngs(0)), WRAPPERS[name](Block.__call__)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.float32)

  @nnx.jit
  def step(model, x):
    return nnx.value_and_grad(lambda model: jnp.mean(run(model, x) ** 2))(model)

  results = [jax.tree.leaves(step(model, x)) for _ in range(2)]
  counts = nnx.state(model, nnx.RngCount)
  statistics = nnx.state(model, nnx.BatchStat)
  return results, jax.tree.leaves(statistics), jax.tree.leaves(counts)


@pytest.mark.parametrize("name", ["exact", "int8"])
def test_statistics_and_dropout_advance_as_under_remat(name):
  results, statistics, counts = train(name)
  expected, expected_statistics, expected_counts = train("remat")
  assert [int(n) for n in counts] == [int(n) for n in expected_counts]
  for found, value in zip(statistics, expected_statistics, strict=True):
    np.testing.assert_allclose(found, value, rtol=1e-5)
  assert results[0][0] != results[1][0]  # Another mask, other statistics.
  tolerance = 1e-5 if name == "exact" else 0.01
  for found, value in zip(results, expected, strict=True):
    for a, b in zip(found, value, strict=True):
      np.testing.assert_allclose(a, b, atol=tolerance)


def test_arguments_by_name_pass_and_new_variables_are_refused():
  def scale(param, x, mode="ones"):
    return param[...] * x + getattr(jnp, mode)(())

  param, run = nnx.Param(2.0), compress_residuals(scale)
  assert run(param, jnp.ones(()), mode="zeros") == 2
  assert run(param, x=jnp.ones(())) == 3

  def adds(block, x):
    block.more = nnx.Param(x)
    return jnp.sum(x)

  with pytest.raises(ValueError, match="`fn` must keep the variables"):
    compress_residuals(adds)(nnx.Dict(), jnp.ones(4))
