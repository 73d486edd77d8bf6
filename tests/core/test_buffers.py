import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.core import check_buffers


def test_arrays_of_their_own_pass():
  x, y = jnp.ones(2), jnp.zeros(2)
  check_buffers({"params": {"w": x}, "batch": [y, y]}, donated=("params",))


def test_what_has_no_buffer_passes():
  x = np.ones(2)
  check_buffers({"params": [x, x, 1.0, None]}, donated=("params",))
  jax.eval_shape(lambda a: check_buffers({"params": [a, a]}, ("params",)), x)


@pytest.mark.parametrize("donated", [(), ("params",)])
def test_a_donated_array_is_refused_by_its_path(donated):
  x = jnp.ones(2)
  jax.jit(lambda a: a + 1, donate_argnums=0)(x)
  with pytest.raises(ValueError, match="`params/w/0` must be .* still exists"):
    check_buffers({"params": {"w": [x]}}, donated)


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (lambda x: {"params": [x, x]}, "`params/1` .* got the array of `params/0`"),
    (lambda x: {"params": x, "batch": x}, "`batch` .* array of `params`"),
    (lambda x: {"batch": x, "params": [x]}, "`params/0` .* array of `batch`"),
  ],
)
def test_an_array_that_is_donated_may_be_given_once(args, message):
  with pytest.raises(ValueError, match=message):
    check_buffers(args(jnp.ones(2)), donated=("params",))
