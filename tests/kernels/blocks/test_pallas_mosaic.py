"""The Mosaic GPU kernels against the reference."""

import jax
import jax.numpy as jnp
import pytest

from experiments.kernels.arrays import Encoding
from jaxmotion.kernels import blocks
from jaxmotion.kernels.blocks._pallas_mosaic import make_grid
from jaxmotion.kernels.microscaling import MicroscalingOp
from jaxmotion.kernels.quantize import AbsmaxOp, MinMaxOp
from jaxmotion.kernels.rotate import RotateOp
from jaxmotion.kernels.sign import SignOp
from jaxmotion.kernels.ternary import TernaryOp
from tests.kernels.blocks.passes import PASSES, check_pass, find_pass
from tests.kernels.lowering import lower, mosaic_kernel_calls

FORCE = {"implementation": "pallas_mosaic"}
CASES = {
  "absmax8": Encoding(AbsmaxOp(bits=8, block=128), (32, 128), special=True),
  # Tiles of 4 blocks in planes of 6: the last two overlap.
  "overlap": Encoding(AbsmaxOp(bits=8, block=128), (24, 128)),
  "absmax6": Encoding(AbsmaxOp(bits=6, block=32), (128, 64)),
  "bfloat16": Encoding(AbsmaxOp(bits=8, block=32), (64, 64), "bfloat16"),
  "minmax": Encoding(MinMaxOp(bits=8, block=32, stochastic=True), (64, 64)),
  "sign": Encoding(SignOp(block=64), (256, 64)),
  "ternary": Encoding(TernaryOp(block=32), (160, 64)),
  "microscaling": Encoding(
    MicroscalingOp(format="float8_e4m3fn", block=32), (64, 64)
  ),
}
# All forms of leaves; encoding covers what quantizers share.
KINDS = ("absmax8", "minmax", "microscaling")


@pytest.mark.parametrize(
  ("step", "name", "sizes"),
  [
    *(("encode", name, {}) for name in CASES),
    *((step, name, {}) for step in PASSES[1:] for name in KINDS),
    ("error", "absmax8", {"count": 0}),
    ("sum", "absmax8", {"workers": 9}),
    ("sum", "overlap", {}),
  ],
)
def test_interpreted_passes_equal_the_reference(step, name, sizes):
  check_pass(step, CASES[name], "pallas_mosaic", **sizes)


@pytest.mark.parametrize("name", KINDS)
def test_each_pass_is_one_kernel(name):
  for step in PASSES:
    fn, argument = find_pass(step, CASES[name], "pallas_mosaic")
    assert mosaic_kernel_calls(fn, argument) == 1


def test_the_other_kernels_are_the_default():
  fn, x = find_pass("encode", CASES["absmax8"], None)
  assert "mosaic_gpu" not in lower(fn, x)


@pytest.mark.parametrize(
  ("width", "live", "span", "group"),
  [(32, 4, 32, 16), (96, 4, 32, 16), (512, 8, 128, 4), (512, 11, 256, 2)],
)
def test_tiles_fit_into_registers(width, live, span, group):
  op = AbsmaxOp(bits=8, block=width)
  like = jax.ShapeDtypeStruct((64, width), jnp.float32)
  grid = make_grid(op, like, live=live, reduces=True)
  assert (grid.span, grid.group) == (span, group)


@pytest.mark.parametrize(
  ("op", "shape", "why"),
  [
    (AbsmaxOp(bits=8, block=128), (100,), "one block"),
    (AbsmaxOp(bits=8, block=128), (37, 128), "not 4 planes of whole blocks"),
    (AbsmaxOp(bits=8, block=30), (64, 30), "multiple of 4 values, got 30"),
    (AbsmaxOp(bits=8, block=32), (16, 32), "at least 16 blocks, got 4"),
    (AbsmaxOp(bits=8, block=8192), (64, 8192), "do not fit into registers"),
    (
      RotateOp(op=AbsmaxOp(bits=8, block=128), length=128, seed=0),
      (64, 128),
      "moves elements of a tile",
    ),
  ],
)
def test_what_kernels_cannot_take_says_so(op, shape, why):
  with pytest.raises(NotImplementedError, match=why):
    blocks.encode(op, jnp.zeros(shape), **FORCE)


def test_error_memory_is_not_updated_by_tiles_that_overlap():
  with pytest.raises(NotImplementedError, match="a multiple of 4, got 6"):
    check_pass("error", CASES["overlap"], "pallas_mosaic")
