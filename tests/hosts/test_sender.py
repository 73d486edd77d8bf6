"""The second thread, which dispatches whatever sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmotion.hosts import Sender

SENDER = Sender(Mesh(np.array(jax.devices()[:1]), ("data",)))
ADD_ONE = jax.jit(lambda x: x + 1)


@jax.jit
def run_long(x, turns):
  """Multiplies matrices, as XLA:CPU runs cheaper programs at once."""
  return jax.lax.fori_loop(0, turns, lambda i, x: jnp.tanh(x @ x), x)


# Each array is asked once. Asked before it is computed, `is_ready` makes a
# future, which another thread sets: asked again, it says no for up to 0.1 ms
# after the array is computed.
def test_what_is_sent_next_follows_what_was_sent():
  x = jnp.ones((256, 256))
  # Nothing is compiled while the long program runs.
  jax.block_until_ready((run_long(ADD_ONE(x), 1), SENDER.send(ADD_ONE, x)))
  sent = SENDER.send(run_long, x, 200)
  again = SENDER.send(ADD_ONE, x)
  again.block_until_ready()
  assert sent.is_ready()


def test_what_is_sent_follows_all_that_the_caller_had_dispatched():
  x = jnp.ones((256, 256))
  before = run_long(x, 100)
  sent = SENDER.send(ADD_ONE, x)
  sent.block_until_ready()
  assert before.is_ready()


def test_errors_of_a_program_are_the_callers():
  def fail(x):
    raise ValueError("`x` must be otherwise.")

  with pytest.raises(ValueError, match="`x` must be otherwise"):
    SENDER.send(jax.jit(fail), np.float32(1))
  assert float(SENDER.send(ADD_ONE, np.float32(1))) == 2
