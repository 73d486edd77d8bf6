import jax.numpy as jnp
import numpy as np

from jaxmotion.kernels._words import mul_high


def test_it_is_the_high_half_of_the_64_bit_product():
  rng = np.random.default_rng(0)
  edges = np.array([0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1], np.uint32)
  random = rng.integers(0, 2**32, 1000, dtype=np.uint32)
  a = np.concatenate([np.repeat(edges, edges.size), random])
  b = np.concatenate([np.tile(edges, edges.size), random[::-1]])
  high = (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32)
  np.testing.assert_array_equal(mul_high(jnp.asarray(a), jnp.asarray(b)), high)
