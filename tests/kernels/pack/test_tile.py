import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmotion.kernels._triton import call_kernel, load, store
from jaxmotion.kernels.pack import num_planes, pack
from jaxmotion.kernels.pack._tile import pack_tile, piece_rows, unpack_tile
from tests.kernels.lowering import kernel_calls, on_gpus

BITS = pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 7, 8, 11, 16, 24, 32])
PACK = functools.partial(jax.jit, static_argnums=1)(pack)
# Blocks of a tile and values in each.
TILE = 2, 16


def codes_of(bits):
  rng = np.random.default_rng(bits)
  return rng.integers(0, 2**bits, (num_planes(bits), *TILE), dtype=np.uint32)


def spot(row, rows):
  """Indices of rows of a tile."""
  shape = rows, *TILE
  i, j, k = (lax.broadcasted_iota(jnp.int32, shape, a) for a in range(3))
  return ((row + i) * TILE[0] + j) * TILE[1] + k


def pack_kernel(codes, words, bits):
  for row, piece in pack_tile(load(codes, spot(0, num_planes(bits))), bits):
    store(words, spot(row, piece.shape[0]), piece)


def unpack_kernel(words, codes, bits):
  pieces = [load(words, spot(row, rows)) for row, rows in piece_rows(bits)]
  store(codes, spot(0, num_planes(bits)), unpack_tile(pieces, bits))


def run(kernel, x, bits, rows, interpret=False):
  out = jax.ShapeDtypeStruct((rows, *TILE), jnp.uint32)
  body = functools.partial(kernel, bits=bits)
  return call_kernel(body, "tile", 1, x.size, [x], out, interpret=interpret)


@BITS
def test_a_tile_packs_to_the_words_of_the_reference(bits):
  codes = codes_of(bits)
  words = PACK(codes, bits)
  got = run(pack_kernel, codes, bits, words.shape[0], interpret=True)
  np.testing.assert_array_equal(got, words)


@BITS
def test_a_tile_unpacks_to_its_codes(bits):
  codes = codes_of(bits)
  words = PACK(codes, bits)
  got = run(unpack_kernel, words, bits, num_planes(bits), interpret=True)
  np.testing.assert_array_equal(got, codes)


@BITS
def test_pieces_are_powers_of_two_of_rows_that_follow_each_other(bits):
  rows_of = lambda x: [(row, p.shape[0]) for row, p in pack_tile(x, bits)]
  rows = []
  jax.eval_shape(lambda x: rows.extend(rows_of(x)), codes_of(bits))
  assert rows == piece_rows(bits)
  row = 0
  for first, rows in piece_rows(bits):
    assert first == row and rows & (rows - 1) == 0
    row += rows
  assert row == num_planes(bits) * bits // 32


@pytest.mark.parametrize(("bits", "gpu"), on_gpus([1, 4, 7, 8, 32]))
def test_both_lower_for_gpus(bits, gpu):
  codes = codes_of(bits)
  words = PACK(codes, bits)
  packing = functools.partial(run, pack_kernel, bits=bits, rows=words.shape[0])
  unpacking = functools.partial(
    run, unpack_kernel, bits=bits, rows=num_planes(bits)
  )
  assert kernel_calls(packing, codes, gpu=gpu) == 1
  assert kernel_calls(unpacking, words, gpu=gpu) == 1
