import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, testing

XS = np.random.default_rng(0).normal(size=(3, 7, 9)).astype(np.float32)


def test_the_laws_of_rounds_and_codecs_hold():
  testing.check_rounds(codecs.onebit(), jnp.asarray(XS))
  testing.check_codec(codecs.onebit(), jnp.asarray(XS[0]), ulps=16)


def test_in_a_chain_it_has_the_state_of_its_workers():
  codec = codecs.chain(codecs.rotate(block=32), codecs.onebit())
  testing.check_rounds(codec, jnp.asarray(XS))
