import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.memory.residuals.trace._bits import pack_codes, unpack_codes

PACK = functools.partial(jax.jit, static_argnums=1)(pack_codes)
UNPACK = functools.partial(jax.jit, static_argnums=(1, 2))(unpack_codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(1,), (7, 5), (4, 3, 64), (5, 4, 8)])
def test_codes_round_trip_through_the_fewest_words(bits, shape):
  codes = np.random.default_rng(0).integers(0, 2**bits, shape)
  words = PACK(codes.astype(np.uint32), bits)
  planes = 32 // bits
  assert words.dtype == jnp.uint32
  assert words.size == -(-codes.size // planes)
  np.testing.assert_array_equal(UNPACK(words, bits, shape), codes)
