"""`compress_residuals` of Linen modules, beside `nn.remat`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, memory
from jaxmotion.linen import compress_residuals

WRAPPERS = {
  "remat": nn.remat,
  "exact": compress_residuals,
  "int8": functools.partial(compress_residuals, codec=codecs.uniform(bits=8)),
}


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    y = nn.BatchNorm(use_running_average=False)(nn.Dense(32)(x))
    return x + nn.Dropout(0.5, deterministic=False)(jnp.tanh(y))


@functools.cache
def train(name):
  """Returns loss, gradients and new statistics for two keys of dropout."""
  model = WRAPPERS[name](Block)()
  x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 32)), jnp.float32)
  key = jax.random.key(0)
  variables = jax.jit(model.init)({"params": key, "dropout": key}, x)

  @jax.jit
  def step(params, key):
    def loss(params):
      y, updates = model.apply(
        {**variables, "params": params},
        x,
        rngs={"dropout": key},
        mutable=["batch_stats"],
      )
      return jnp.mean(y**2), updates

    return jax.value_and_grad(loss, has_aux=True)(params)

  keys = jax.random.split(key)
  return [jax.tree.leaves(step(variables["params"], k)) for k in keys]


@pytest.mark.parametrize("name", ["exact", "int8"])
def test_statistics_and_dropout_advance_as_under_remat(name):
  results, expected = train(name), train("remat")
  assert results[0][0] != results[1][0]
  tolerance = 1e-5 if name == "exact" else 0.01
  for found, value in zip(results, expected, strict=True):
    for a, b in zip(found, value, strict=True):
      np.testing.assert_allclose(a, b, atol=tolerance)


def test_the_wrapper_of_functions_names_the_one_of_modules():
  with pytest.raises(TypeError, match=r"the class Dense.*`jaxmotion\.linen"):
    memory.compress_residuals(nn.Dense)
