import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models.initial import draw_kernel, draw_table

INITIALIZERS = {
  "lecun": (draw_kernel(), nnx.initializers.lecun_normal()),
  "he": (draw_kernel(2.0), nnx.initializers.he_normal()),
  "table": (draw_table(0.02), nnx.initializers.normal(0.02)),
}


# One shape is drawn with others, one has a program of its own.
@pytest.mark.parametrize("shape", [(3, 5), (70, 60)])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_values_are_those_of_flax(name, shape):
  ours, theirs = INITIALIZERS[name]
  key = jax.random.key(3)
  drawn = ours(key, shape, jnp.float32)
  expected = theirs(key, shape, jnp.float32)
  assert (drawn.shape, drawn.dtype) == (expected.shape, expected.dtype)
  # One compiler may multiply by the deviation another way.
  np.testing.assert_allclose(drawn, expected, rtol=3e-7)
