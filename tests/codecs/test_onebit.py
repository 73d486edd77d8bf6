import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, testing

XS = np.random.default_rng(0).normal(size=(3, 7, 9)).astype(np.float32)


@pytest.mark.parametrize(
  "codec",
  [
    codecs.onebit(),
    # In a chain it has the state of its workers.
    codecs.chain(codecs.rotate(block=32), codecs.onebit()),
  ],
)
def test_the_laws_of_rounds_hold(codec):
  testing.check_rounds(codec, jnp.asarray(XS))
