import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from experiments import _cuda
from jaxmotion import memory

WIDTH, REPEATS = 128, 24


def _block(kernel, x):
  how = ("NHWC", "HWIO", "NHWC")
  y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=how)
  return x + jnp.tanh(y)


def _loss(x, y):
  return jnp.mean((x - y) ** 2)


@pytest.mark.skipif(_cuda.refusal() is not None, reason="cannot be compiled")
def test_an_update_in_the_backward_pass_holds_no_copy_of_the_kernels():
  model = memory.update_in_backward(
    [(_block, REPEATS)], _loss, optax.sgd(0.1), segment=1
  )
  kernels = jax.ShapeDtypeStruct((REPEATS, 3, 3, WIDTH, WIDTH), "float32")
  x = jax.ShapeDtypeStruct((2, 4, 4, WIDTH), "float32")
  state = jax.eval_shape(model.init, [kernels])
  needs = _cuda.memory_for(
    model.step, [kernels], state, x, x, donate_argnums=(0, 1)
  )
  assert needs.alias_bytes == kernels.size * 4
  assert needs.temp_bytes < needs.alias_bytes / 2
