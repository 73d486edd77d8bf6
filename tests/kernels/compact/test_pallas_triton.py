import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from experiments.kernels.arrays import MARKED
from jaxmotion import codecs
from jaxmotion.kernels import compact
from jaxmotion.kernels.compact import (
  NonZeros,
  _pallas_triton as triton,
  _reference as reference,
)
from tests.kernels.compact.tiles import TILES
from tests.kernels.lowering import interpret, kernel_calls, on_gpus

CASES = pytest.mark.parametrize("case", TILES)


def both(op, *args, **static):
  """Returns the results of the kernel and of the reference."""
  return tuple(
    jax.jit(functools.partial(fn, **static))(*args)
    for fn in (interpret(getattr(triton, op)), getattr(reference, op))
  )


def same(got, wanted):
  assert jax.tree.structure(got) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  ("case", "least"), [*((case, 1.0) for case in MARKED), ("special", 1e-42)]
)
def test_marks_are_those_of_the_reference(case, least):
  same(*both("threshold_bitmap", MARKED[case](), threshold=least))


# One word, words of two programs; few marks in a word and many.
@pytest.mark.parametrize(
  ("size", "density", "share"),
  [
    *((4100, d, s) for d in (0.02, 0.6) for s in (0.01, 1.0)),
    (1, 0.02, 1.0),
    (1, 0.6, 1.0),
  ],
)
def test_positions_are_those_of_the_reference(size, density, share):
  keep = np.random.default_rng(size).random(size) < density
  bitmap = jax.jit(lambda x: reference.threshold_bitmap(x, threshold=1.0))(
    1.0 * keep
  )
  start, capacity = reference.prefix_counts(bitmap), max(1, int(share * size))
  got, wanted = both("bitmap_positions", bitmap, start, capacity=capacity)
  assert got.shape == wanted.shape and got.dtype == wanted.dtype
  found = min(capacity, int(keep.sum()))
  np.testing.assert_array_equal(got[:found], wanted[:found])


@CASES
def test_compaction_and_expansion_are_those_of_the_reference(case):
  make, tile, capacity = TILES[case]
  words = make()
  got, wanted = both("compact_tiles", words, tile=tile, capacity=capacity)
  same(got, wanted)
  same(*both("expand_tiles", wanted, size=words.size))


@jax.jit
@interpret
def _round_trip(words):
  tiles = triton.compact_tiles(words, tile=96, capacity=50)
  return tiles, triton.expand_tiles(tiles, size=words.size)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=150, max_size=150))
def test_what_is_not_dropped_comes_back(values):
  words = np.array(values, np.uint32)
  tiles, back = _round_trip(words)
  rows = np.pad(words, (0, 42)).reshape(2, 96)
  held = (rows != 0).cumsum(1) <= 50
  np.testing.assert_array_equal(back, np.where(held, rows, 0).ravel()[:150])
  np.testing.assert_array_equal(tiles.count, (rows != 0).sum(1))


U32 = jnp.uint32
TILED = NonZeros(
  jax.ShapeDtypeStruct((2, 32), U32),
  jax.ShapeDtypeStruct((2, 500), U32),
  jax.ShapeDtypeStruct((2,), U32),
)
OPS = {
  "mark": (
    lambda x: compact.threshold_bitmap(x, 1.0),
    [jax.ShapeDtypeStruct((3000,), jnp.float32)],
  ),
  "select": (
    lambda b, s: compact.bitmap_positions(b, s, 100),
    [
      jax.ShapeDtypeStruct((300,), U32),
      jax.ShapeDtypeStruct((301,), jnp.int32),
    ],
  ),
  "compact": (
    lambda w: compact.compact_tiles(w, 1024, 500),
    [jax.ShapeDtypeStruct((2000,), U32)],
  ),
  "expand": (lambda t: compact.expand_tiles(t, 2000), [TILED]),
}


@pytest.mark.parametrize(("op", "gpu"), on_gpus(OPS))
def test_an_op_is_one_kernel(op, gpu, monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  fn, args = OPS[op]
  assert kernel_calls(fn, *args, gpu=gpu) == 1


@pytest.mark.parametrize("op", OPS)
def test_an_op_is_one_kernel_for_all_rows_of_a_vmap(op, monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  fn, args = OPS[op]
  rows = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), args
  )
  assert kernel_calls(jax.vmap(fn), *rows) == 1


def test_rows_of_a_vmap_are_compacted_by_themselves():
  words = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 100)), U32)
  of = {"tile": 32, "capacity": 20}
  kernel = functools.partial(interpret(triton.compact_tiles), **of)
  got = jax.jit(jax.vmap(kernel))(words)
  one = jax.jit(functools.partial(reference.compact_tiles, **of))
  same(got, jax.tree.map(lambda *a: jnp.stack(a), *map(one, words)))


def test_workers_of_a_shard_map_compact_by_themselves(monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  mesh = jax.sharding.AbstractMesh(
    (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )

  def trip(words):
    tiles = compact.compact_tiles(words, 64, 40)
    return compact.expand_tiles(tiles, words.size)

  fn = jax.shard_map(trip, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
  assert jax.eval_shape(fn, jnp.zeros(2000, U32)).shape == (2000,)


def test_the_codec_of_zeros_is_one_kernel_each_way(monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  codec = codecs.zero_value(capacity=0.5)
  x = jax.ShapeDtypeStruct((64, 100), jnp.bfloat16)
  assert kernel_calls(lambda x: codec.encode(x)[0], x) == 1
  assert kernel_calls(lambda p: codec.decode(p, x), codec.payload_like(x)) == 1
