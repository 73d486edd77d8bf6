import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.codecs import topk
from jaxmotion.wire import payload_bytes
from tests.codecs.jitted import normal, trip


def expected(x, k, block):
  flat = np.pad(x.reshape(-1), (0, -x.size % block)).reshape(block, -1)
  # Stable: of equal magnitudes the first ones.
  keep = np.argsort(-np.abs(flat), axis=0, kind="stable")[:k]
  y = np.zeros_like(flat)
  np.put_along_axis(y, keep, np.take_along_axis(flat, keep, 0), 0)
  return y.reshape(-1)[: x.size].reshape(x.shape)


@pytest.mark.parametrize(
  ("density", "block", "k", "shape"),
  [
    (0.1, 40, 4, (37, 29)),
    (1.0, 4, 4, (37, 29)),
    # Fewer elements than a block has.
    (0.5, 64, 2, (5,)),
    (0.01, 20, 1, (5,)),
  ],
)
def test_the_largest_of_every_block_are_kept(density, block, k, shape):
  x = normal(*shape)
  _, y = trip(topk(density=density, block=block), x)
  np.testing.assert_array_equal(y, expected(x, k, min(block, x.size)))


@pytest.mark.parametrize(
  ("shape", "density", "block"),
  [((997,), 0.01, 100), ((64, 128), 0.01, 128), ((20, 7), 0.02, 50)],
)
def test_without_a_block_one_in_density_is_kept(shape, density, block):
  x = normal(*shape)
  payload, y = trip(topk(density=density), x)
  assert payload.values.size == -(-x.size // block)
  np.testing.assert_array_equal(y, expected(x, 1, block))


@pytest.mark.parametrize(
  ("block", "bits"), [(2, 1), (3, 2), (16, 4), (17, 8), (256, 8), (257, 9)]
)
def test_a_payload_is_values_and_packed_places(block, bits):
  # 32 blocks fill the columns of any width.
  codec = topk(density=1 / block, block=block)
  like = jax.ShapeDtypeStruct((32 * block,), jnp.float32)
  assert payload_bytes(codec, like) == 32 * 4 + 32 * bits // 8


def test_narrow_values_come_back_exactly():
  x = jnp.asarray(normal(64), jnp.bfloat16)
  _, y = trip(topk(density=1.0, block=2), x)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_array_equal(y, x)
