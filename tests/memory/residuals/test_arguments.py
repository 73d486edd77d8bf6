"""Arguments: static ones, those without a gradient, and forward mode."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals, residuals_of
from tests.memory.residuals.nets import distance, make, normal, squared


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


W, X = jnp.eye(4), jnp.linspace(-1, 1, 8).reshape(2, 4)


def layer(w, x):
  return jnp.tanh(x @ w)


LAYER = compress_residuals(layer)


def repeat(fn, w, x):
  return lax.scan(lambda x, _: (fn(w, x), None), x, None, length=3)[0].sum()


FORWARD = {
  "jvp": lambda w: jax.jvp(lambda w: LAYER(w, X), (w,), (w,)),
  "jvp of jit": lambda w: jax.jvp(lambda w: jax.jit(LAYER)(w, X), (w,), (w,)),
  "jacfwd": lambda w: jax.jacfwd(LAYER)(w, X),
  "linearize": lambda w: jax.linearize(lambda w: LAYER(w, X), w)[1](w),
  "loop": lambda w: jax.jvp(lambda w: repeat(LAYER, w, X), (w,), (w,)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused_by_the_name_of_the_wrapper(name):
  for call in (FORWARD[name], jax.jit(FORWARD[name])):
    with pytest.raises(TypeError, match="`compress_residuals` has no forward"):
      call(W)


def test_tangents_of_other_arguments_pass():
  def fn(scale):
    return scale * LAYER(W, X)

  primal, tangent = jax.jvp(fn, (3.0,), (2.0,))
  assert jnp.array_equal(2 * primal, 3 * tangent)


REVERSE = {
  "loop": lambda fn: jax.grad(lambda w: repeat(fn, w, X)),
  "checkpoint": lambda fn: jax.grad(jax.checkpoint(lambda w: repeat(fn, w, X))),
  "grad of vmap": lambda fn: jax.grad(
    lambda w: jax.vmap(lambda x: fn(w, x))(X).sum()
  ),
  "vmap of grad": lambda fn: jax.vmap(
    jax.grad(lambda w: fn(w, X).sum()), axis_size=1, in_axes=None
  ),
  "jacrev": lambda fn: jax.jacrev(lambda w: fn(w, X)),
}


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_is_that_of_the_function(name):
  make = REVERSE[name]
  for wrap in (lambda fn: fn, jax.jit):
    found, wanted = wrap(make(LAYER))(W), wrap(make(layer))(W)
    assert jnp.allclose(found, wanted, rtol=1e-6, atol=1e-6)
