import jax
import numpy as np
import pytest

from jaxmotion.codecs import rotate, uniform
from tests.codecs.jitted import decode, encode

# One row, shorter than a block; many rows, the last one padded; full rows.
SIZED = pytest.mark.parametrize(
  ("block", "size"), [(32, 1), (64, 5), (32, 1000), (128, 256), (256, 1000)]
)
BLOCKS = pytest.mark.parametrize("block", [32, 64, 128, 256])


def normal(*shape):
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def by_block(codec, x):
  """The array in the rows of the payload."""
  width = jax.eval_shape(codec.encode, x)[0].values.shape[1]
  flat = x.reshape(-1)
  return np.pad(flat, (0, -flat.size % width)).reshape(-1, width)


@SIZED
def test_decode_inverts_encode(block, size):
  codec, x = rotate(block=block), normal(size)
  payload, _ = encode(codec, x)
  y = np.asarray(decode(codec, payload, x))
  norms = np.linalg.norm(by_block(codec, x), axis=1).max()
  assert np.abs(y - x).max() <= 2**-21 * norms


@SIZED
def test_each_block_keeps_its_norm(block, size):
  codec, x = rotate(block=block), normal(size)
  payload, _ = encode(codec, x)
  np.testing.assert_allclose(
    np.linalg.norm(payload.values, axis=1),
    np.linalg.norm(by_block(codec, x), axis=1),
    rtol=1e-5,
  )


@BLOCKS
def test_an_outlier_is_spread_evenly(block):
  x = np.zeros(2 * block, np.float32)
  x[block + 3] = 1.0
  payload, _ = encode(rotate(block=block), x)
  values = np.abs(payload.values)
  assert not values[0].any()
  np.testing.assert_allclose(values[1], block**-0.5, rtol=1e-6)


def test_seeds_and_positions_have_their_own_signs():
  x = np.ones(256, np.float32)
  a, b = (encode(rotate(seed=s), x)[0].values for s in (0, 1))
  assert (np.asarray(a) != np.asarray(b)).any()
  assert (np.asarray(a[0]) != np.asarray(a[1])).any()


def test_a_short_array_is_one_block_of_the_next_power_of_two():
  for size, width in ((1, 1), (2, 2), (5, 8), (100, 128), (300, 128)):
    x = jax.ShapeDtypeStruct((size,), np.float32)
    payload, _ = jax.eval_shape(rotate().encode, x)
    assert payload.values.shape == (-(-size // width), width)


def test_quantizing_after_it_loses_less_of_a_spiky_array():
  x = normal(64, 128)
  x[:, 0] *= 100

  def error(first, then):
    rotated, _ = encode(first, x) if first else (None, ())
    values = rotated.values if first else x
    q, _ = encode(then, values)
    y = decode(then, q, values)
    if first:
      y = decode(first, rotated._replace(values=y), x)
    return float(np.linalg.norm(y - x))

  then = uniform(bits=4, block=128)
  assert error(rotate(), then) < 0.7 * error(None, then)


@pytest.mark.parametrize("block", [16, 100, 512])
def test_other_blocks_are_refused(block):
  with pytest.raises(ValueError, match="`block` must be one of"):
    rotate(block=block)
