"""Ops as Triton kernels of a GPU that is absent: lowered, not run."""

import jax
import pytest

from jaxmotion import codecs, core
from jaxmotion.kernels import compact, pack, select
from tests.kernels.lowering import kernel_calls, lower, on_gpus


def words(*shape, dtype="uint32"):
  return jax.ShapeDtypeStruct(shape, dtype)


FEW = words(1000, dtype="float32")
TILES = compact.NonZeros(words(2, 32), words(2, 500), words(2))
# The function, its arrays, and its other arguments.
OPS = {
  **{
    f"pack {bits} {size}": (pack.pack_flat, [words(size)], bits)
    for bits, size in ((1, 32768), (3, 999), (4, 32768), (11, 32768))
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


@pytest.mark.parametrize(("op", "gpu"), on_gpus(OPS))
def test_an_op_is_one_kernel(op, gpu):
  named, arrays = choose(op, "pallas_triton")
  assert kernel_calls(named, *arrays, gpu=gpu) == 1
  chosen, _ = choose(op, None)
  assert kernel_calls(chosen, *arrays, gpu=gpu) == 1


@pytest.mark.parametrize(
  "op",
  """
  threshold_bitmap bitmap_positions compact_tiles expand_tiles topk_select
  topk_sum topk_scatter
  """.split(),
)
def test_an_op_is_one_kernel_for_all_rows_of_a_vmap(op):
  named, arrays = choose(op, "pallas_triton")
  rows = jax.tree.map(lambda a: words(3, *a.shape, dtype=a.dtype), arrays)
  assert kernel_calls(jax.vmap(named), *rows) == 1


def test_a_codec_runs_what_the_environment_names(monkeypatch):
  codec = codecs.zero_value(capacity=0.5)
  x = words(64, 100, dtype="bfloat16")
  encode = lambda x: codec.encode(x)[0]
  for name, calls in (("pallas_triton", 1), ("reference", 0)):
    monkeypatch.setenv("JAXMOTION_KERNELS", name)
    assert kernel_calls(encode, x) == calls


def test_a_loop_of_a_kernel_stays_one_in_an_exchange():
  fn = lambda *words: select.topk_sum(*words, FEW, 50)
  arrays = OPS["topk_sum"][1][:2]
  assert lower(core.trace_in_place(fn), *arrays) == lower(fn, *arrays)
