import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmotion.kernels import pack as room
from jaxmotion.kernels._triton import call_kernel, load, store
from jaxmotion.kernels.pack import (
  _pallas_triton as triton,
  _reference as reference,
)
from tests.kernels.lowering import interpret, kernel_calls, on_gpus

PACK = functools.partial(jax.jit, static_argnums=1)(reference.pack)
PACK_FLAT = functools.partial(jax.jit, static_argnums=1)(reference.pack_flat)
BITS = pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 7, 8, 11, 16, 24, 32])
# Blocks of a tile and values in each.
TILE = 2, 16


def codes_of(bits, *shape):
  rng = np.random.default_rng(bits)
  return jnp.asarray(rng.integers(0, 2**bits, shape, dtype=np.uint32))


# Packed indices have 10 to 16 bits and more; 11 bits are three fields. One
# code, whole columns, past a tile, whole tiles.
@pytest.mark.parametrize(
  ("bits", "size"),
  [
    *((bits, 999) for bits in (1, 2, 3, 4, 6, 8, 11, 22)),
    (3, 1),
    (4, 64),
    (8, 4 * 513),
    (8, 4 * 1024),
  ],
)
def test_words_and_codes_are_those_of_the_reference(bits, size):
  codes = codes_of(bits, size)
  words = PACK_FLAT(codes, bits)
  packing = functools.partial(interpret(triton.pack_flat), bits=bits)
  got = jax.jit(packing)(codes)
  assert got.dtype == jnp.uint32
  np.testing.assert_array_equal(got, words)
  unpacking = functools.partial(
    interpret(triton.unpack_flat), bits=bits, size=size
  )
  np.testing.assert_array_equal(jax.jit(unpacking)(words), codes)


@pytest.mark.parametrize(
  ("form", "gpu"), on_gpus([*((b, 32768) for b in (1, 3, 8, 11, 22)), (3, 999)])
)
def test_packing_and_unpacking_are_one_kernel_each(form, gpu):
  bits, size = form

  def both(codes):
    words = triton.pack_flat(codes, bits=bits)
    return words, triton.unpack_flat(words, bits=bits, size=size)

  assert kernel_calls(both, jnp.zeros(size, jnp.uint32), gpu=gpu) == 2


def test_a_batch_is_one_kernel():
  packing = functools.partial(triton.pack_flat, bits=3)
  codes = jnp.zeros((3, 1000), jnp.uint32)
  assert kernel_calls(jax.vmap(packing), codes) == 1


def test_a_shard_is_one_kernel():
  packing = functools.partial(triton.pack_flat, bits=3)
  sharded = jax.shard_map(
    packing, in_specs=jax.P("x"), out_specs=jax.P(None, "x")
  )
  assert kernel_calls(sharded, jnp.zeros(1000, jnp.uint32)) == 1


OPS = {
  "pack_flat": lambda x, **how: room.pack_flat(x, 3, **how),
  "unpack_flat": lambda x, **how: room.unpack_flat(
    x.reshape(3, -1), 3, 1000, **how
  ),
}


@pytest.mark.parametrize("op", OPS)
def test_kernels_run_if_named_and_not_otherwise(op):
  x = jnp.zeros(96 * 32, jnp.uint32)
  named = functools.partial(OPS[op], implementation="pallas_triton")
  assert kernel_calls(named, x) == 1
  # For a host.
  fn = lambda x: OPS[op](x)
  assert "triton" not in jax.jit(fn).lower(x).as_text()


@pytest.mark.parametrize(("bits", "kernels"), [(3, 1), (4, 0)])
def test_gpus_run_the_kernel_where_xla_reads_codes_twice(bits, kernels):
  codes = jnp.zeros(1000, jnp.uint32)
  assert kernel_calls(lambda x: room.pack_flat(x, bits), codes) == kernels


def test_no_codes_are_the_reference_s(monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  assert room.pack_flat(jnp.zeros((0,), jnp.uint32), 4).shape == (1, 0)


def spot(row, rows):
  """Indices of rows of a tile."""
  shape = rows, *TILE
  i, j, k = (lax.broadcasted_iota(jnp.int32, shape, a) for a in range(3))
  return ((row + i) * TILE[0] + j) * TILE[1] + k


def pack_kernel(codes, words, bits):
  codes = load(codes, spot(0, reference.num_planes(bits)))
  for row, piece in enumerate(reference.pack_tile(codes, bits)):
    store(words, spot(row, 1), piece)


def unpack_kernel(words, codes, bits):
  rows = range(reference.word_rows(bits))
  pieces = [load(words, spot(row, 1)) for row in rows]
  values = reference.unpack_tile(pieces, bits)
  store(codes, spot(0, reference.num_planes(bits)), values)


def run_tile(kernel, x, bits, rows):
  out = jax.ShapeDtypeStruct((rows, *TILE), jnp.uint32)
  body = functools.partial(kernel, bits=bits)
  return call_kernel(body, "tile", 1, x.size, [x], out)


@BITS
def test_a_tile_packs_to_the_words_of_the_reference_and_unpacks(bits):
  planes = reference.num_planes(bits)
  codes = codes_of(bits, planes, *TILE)
  words = PACK(codes, bits)
  run = interpret(run_tile)
  got = run(pack_kernel, codes, bits, words.shape[0])
  np.testing.assert_array_equal(got, words)
  np.testing.assert_array_equal(run(unpack_kernel, words, bits, planes), codes)


@pytest.mark.parametrize(("bits", "gpu"), on_gpus([1, 4, 7, 8, 32]))
def test_both_lower_for_gpus(bits, gpu):
  planes = reference.num_planes(bits)
  codes = codes_of(bits, planes, *TILE)
  words = PACK(codes, bits)
  packing = lambda x: run_tile(pack_kernel, x, bits, words.shape[0])
  unpacking = lambda x: run_tile(unpack_kernel, x, bits, planes)
  assert kernel_calls(packing, codes, gpu=gpu) == 1
  assert kernel_calls(unpacking, words, gpu=gpu) == 1
