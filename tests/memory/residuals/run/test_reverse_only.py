"""Forward mode is refused by name; reverse mode and zeros pass as they are."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmotion.memory import compress_residuals

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
