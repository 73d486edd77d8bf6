import jax
import numpy as np
import pytest

from jaxmotion.codecs import rotate
from tests.codecs.jitted import encode, normal, trip

# One row, shorter than a block; many rows, the last one padded; full rows.
SIZES = [(32, 1), (64, 5), (32, 1000), (128, 256), (256, 1000)]


def by_block(codec, x):
  """The array in the rows of the payload."""
  width = jax.eval_shape(codec.encode, x)[0].values.shape[1]
  flat = x.reshape(-1)
  return np.pad(flat, (0, -flat.size % width)).reshape(-1, width)


@pytest.mark.parametrize(("block", "size"), SIZES)
def test_decode_inverts_encode_and_blocks_keep_their_norms(block, size):
  codec, x = rotate(block=block), normal(size)
  payload, y = trip(codec, x)
  norms = np.linalg.norm(by_block(codec, x), axis=1)
  assert np.abs(y - x).max() <= 2**-21 * norms.max()
  found = np.linalg.norm(payload.values, axis=1)
  np.testing.assert_allclose(found, norms, rtol=1e-5)


@pytest.mark.parametrize("block", [32, 64, 128, 256])
def test_an_outlier_is_spread_evenly(block):
  x = np.zeros(2 * block, np.float32)
  x[block + 3] = 1.0
  payload, _ = encode(rotate(block=block), x)
  values = np.abs(payload.values)
  assert not values[0].any()
  np.testing.assert_allclose(values[1], block**-0.5, rtol=1e-6)


def test_signs_are_those_of_seed_and_place_and_short_arrays_are_one_block():
  x = np.ones(256, np.float32)
  a, b = (encode(rotate(seed=s), x)[0].values for s in (0, 1))
  assert (np.asarray(a) != np.asarray(b)).any()
  assert (np.asarray(a[0]) != np.asarray(a[1])).any()
  for size, width in ((1, 1), (2, 2), (5, 8), (100, 128), (300, 128)):
    x = jax.ShapeDtypeStruct((size,), np.float32)
    payload, _ = jax.eval_shape(rotate().encode, x)
    assert payload.values.shape == (-(-size // width), width)


@pytest.mark.parametrize("block", [16, 100, 512])
def test_other_blocks_are_refused(block):
  with pytest.raises(ValueError, match="`block` must be one of"):
    rotate(block=block)
