"""Codecs that transform blocks and tiles."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, testing
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


RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 13)).astype(np.float32)


@pytest.mark.parametrize("fit", ["pad", "divide"])
def test_all_elements_come_back_in_their_places(fit):
  xs = [normal(*s) for s in ((7, 13), (2, 3, 5), (11,), (), (0, 3))]
  for codec in (codecs.tiles(chunk=4, fit=fit), codecs.dct(chunk=4, fit=fit)):
    run = jax.jit(lambda xs, c=codec: [c.decode(c.encode(x)[0], x) for x in xs])
    for x, y in zip(xs, run(xs), strict=True):
      np.testing.assert_allclose(y, x, atol=1e-5)


def test_a_column_is_one_tile():
  x = jnp.asarray(X[:6, :8])
  columns = codecs.tiles(chunk=4).encode(x)[0].values
  assert columns.shape == (12, 4)
  np.testing.assert_array_equal(columns[:, 1].reshape(3, 4), x[:3, 4:])
  rows = codecs.tiles(chunk=4, shape="row").encode(x)[0].values
  np.testing.assert_array_equal(rows, x.T)


def test_the_transform_of_a_tile_is_that_of_cosines():
  """Against the sum that defines the orthonormal DCT-II."""
  x = X[:4, :3].astype(np.float64)

  def cosine(n, k):
    scale = np.sqrt((1 if k == 0 else 2) / n)
    return scale * np.cos(np.pi * (2 * np.arange(n) + 1) * k / (2 * n))

  pairs = itertools.product(range(4), range(3))
  expected = [cosine(4, i) @ x @ cosine(3, j) for i, j in pairs]
  found = codecs.dct(chunk=8).encode(jnp.asarray(X[:4, :3]))[0].values
  np.testing.assert_allclose(found[:, 0], expected, atol=1e-5)


def test_a_share_of_a_column_is_rounded_up_and_excludes_a_count():
  x = jnp.asarray(X[:, :2])  # Columns of seven elements.
  payload, _ = codecs.topk_columns(density=0.15).encode(x)
  assert payload.values.size == 2 * 2
  for fields in ({}, {"count": 1, "density": 0.1}):
    with pytest.raises(ValueError, match="`count` must be given if `density`"):
      codecs.topk_columns(**fields)


@pytest.mark.parametrize("codec", [codecs.tiles(chunk=4), codecs.dct(chunk=4)])
def test_many_tiles_keep_the_laws_of_codecs(codec):
  assert testing.find_breaches(codec, testing.make_rows(X)) == []


def test_a_selected_element_takes_two_bits_and_those_of_its_place():
  # 64 of the 4096 elements of a tile, as SparseLoCo sends them.
  codec = codecs.chain(
    codecs.tiles(chunk=64),
    codecs.topk_columns(count=64),
    codecs.codebook(bits=2, span=6.0),
  )
  x = normal(512, 512)
  payload, _ = codec.encode(x)
  sent = 8 * sum(a.nbytes for a in jax.tree.leaves(payload))
  # Each tile and group of the codebook adds a scale.
  assert sent / 64 == pytest.approx(64 * (2 + 12), rel=0.04)
  kept = codec.decode(payload, x)
  assert np.count_nonzero(kept) == 64 * 64
