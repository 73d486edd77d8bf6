import jax.numpy as jnp
import pytest

from jaxmotion.controllers import Times, fixed


def test_it_takes_any_signal_and_stays():
  controller = fixed(1)
  for signal in (jnp.full(2, jnp.nan), Times(jnp.ones(2), jnp.ones(2))):
    state = controller.update(signal, controller.init(signal))
    assert controller.level(state).tolist() == [1, 1]
    assert int(state.history.step) == 1


def test_a_level_that_is_none_is_named():
  with pytest.raises(ValueError, match="`at` must be an integer in .*, got -1"):
    fixed(-1)
