"""Arguments and results that are no arrays."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals, residuals_of
from tests.memory.residuals.nets import normal


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
  """A module whose leaves are weights, a function, a name and a flag."""

  w: jax.Array
  activation: Callable
  name: str
  use_bias: object


def run_layer(layer, x, train, mode="sum"):
  y = layer.activation(x @ layer.w)
  y = 2 * y if train else y
  return jnp.sum(jnp.sin(y)), {"name": layer.name, "mode": mode, "y": y[0, 0]}


def test_modules_flags_and_results_of_other_types_pass():
  fn = compress_residuals(
    run_layer, codecs.cast("bfloat16"), static_argnums=(2, -1)
  )
  w, x = normal(0, 64, 64), normal(1, 64, 64)

  def loss(run, w, train):
    value, aux = run(Layer(w, jnp.tanh, "top", object()), x, train, "mean")
    assert (aux["name"], aux["mode"]) == ("top", "mean")
    return value + aux["y"]

  for train in (True, False):
    expected, found = (
      jax.jit(jax.grad(functools.partial(loss, run)), static_argnums=1)(
        w, train
      )
      for run in (run_layer, fn)
    )
    np.testing.assert_allclose(found, expected, atol=0.1)


def test_residuals_of_modules_with_functions_are_listed():
  layer = Layer(normal(0, 64, 64), jnp.tanh, "top", None)
  train = functools.partial(run_layer, train=True)
  found = residuals_of(train, layer, normal(1, 64, 64))
  assert "dense/1" in {r.name for r in found}


def test_a_flag_that_is_traced_says_so():
  with pytest.raises(jax.errors.TracerBoolConversionError):
    compress_residuals(run_layer)(
      Layer(normal(0, 8, 8), jnp.tanh, "", None), normal(1, 8, 8), True
    )
