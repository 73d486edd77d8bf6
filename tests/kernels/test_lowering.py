"""Ops as Triton kernels of a GPU that is absent: lowered, not run."""

import jax
import pytest

from jaxmotion import codecs
from jaxmotion.kernels import compact, narrow, pack, select
from tests.kernels.lowering import kernel_calls, on_gpus


def words(*shape, dtype="uint32"):
  return jax.ShapeDtypeStruct(shape, dtype)


X, ODD, FEW = (words(n, dtype="float32") for n in (8192, 1001, 1000))
PLANES = (words(2, 8192, dtype="uint8"),) * 3
TILES = compact.NonZeros(words(2, 32), words(2, 500), words(2))
# The function, its arrays, and its other arguments.
OPS = {
  **{
    f"cast_encode {dtype}": (narrow.cast_encode, [x], dtype)
    for dtype, x in (("bfloat16", X), ("float16", ODD), ("float8_e5m2", ODD))
  },
  "cast_decode": (
    narrow.cast_decode,
    [words(8192, dtype="uint16")],
    X,
    "bfloat16",
  ),
  "cast_sum": (narrow.cast_sum, [words(2, 8192, dtype="uint16")], X, "float16"),
  "cast_sum of many": (
    narrow.cast_sum,
    [words(9, 1001, dtype="uint8")],
    ODD,
    "float8_e4m3fn",
  ),
  **{
    f"truncate_encode {count} {rounding}": (
      narrow.truncate_encode,
      [X],
      count,
      rounding,
    )
    for count, rounding in ((1, "nearest"), (2, "zero"), (3, "nearest"))
  },
  "truncate_decode": (
    narrow.truncate_decode,
    [(words(8192, dtype="uint8"),) * 3],
    X,
  ),
  "truncate_sum": (narrow.truncate_sum, [PLANES], X),
  **{
    f"pack {bits} {size}": (pack.pack_flat, [words(size)], bits)
    for bits, size in ((1, 32768), (3, 999), (8, 32768), (11, 32768))
  },
  **{
    f"unpack {bits}": (pack.unpack_flat, [words(bits, 32)], bits, 999)
    for bits in (1, 3, 11)
  },
  "threshold_bitmap": (compact.threshold_bitmap, [FEW], 1.0),
  "bitmap_positions": (
    compact.bitmap_positions,
    [words(300), words(301, dtype="int32")],
    100,
  ),
  "compact_tiles": (compact.compact_tiles, [words(2000)], 1024, 500),
  "expand_tiles": (compact.expand_tiles, [TILES], 2000),
  "topk_select": (select.topk_select, [FEW], 2, 50),
  "topk_sum": (
    select.topk_sum,
    [words(8, 2, 20, dtype="float32"), words(8, 2, 20)],
    FEW,
    50,
  ),
  "topk_scatter": (
    select.topk_scatter,
    [words(2, 20, dtype="float32"), words(2, 20)],
    FEW,
    50,
  ),
}


def choose(op, implementation):
  """Returns a function of an op's arrays by one implementation, and these."""
  fn, arrays, *static = OPS[op]
  return lambda *a: fn(*a, *static, implementation=implementation), arrays


# Where XLA is as good, kernels run only if they are named.
NAMED = ("cast_", "truncate_", "unpack", "pack 1 ", "pack 8 ", "topk_scatter")


@pytest.mark.parametrize(("op", "gpu"), on_gpus(OPS))
def test_an_op_is_one_kernel(op, gpu):
  named, arrays = choose(op, "pallas_triton")
  assert kernel_calls(named, *arrays, gpu=gpu) == 1
  chosen, _ = choose(op, None)
  assert kernel_calls(chosen, *arrays, gpu=gpu) == (
    0 if op.startswith(NAMED) else 1
  )


@pytest.mark.parametrize(
  "op",
  """
  cast_sum truncate_decode threshold_bitmap bitmap_positions compact_tiles
  expand_tiles topk_select topk_sum topk_scatter
  """.split(),
)
def test_an_op_is_one_kernel_for_all_rows_of_a_vmap(op):
  named, arrays = choose(op, "pallas_triton")
  rows = jax.tree.map(lambda a: words(3, *a.shape, dtype=a.dtype), arrays)
  assert kernel_calls(jax.vmap(named), *rows) == 1


@pytest.mark.parametrize(
  "codec",
  [
    codecs.cast("float8_e5m2"),
    codecs.truncate(bytes=2),
    codecs.zero_value(capacity=0.5),
  ],
  ids=repr,
)
def test_codecs_run_what_the_environment_names(codec, monkeypatch):
  monkeypatch.setenv("JAXMOTION_KERNELS", "pallas_triton")
  x = words(64, 100, dtype="bfloat16")
  assert kernel_calls(lambda x: codec.encode(x)[0], x) == 1
  assert kernel_calls(lambda p: codec.decode(p, x), codec.payload_like(x)) == 1
