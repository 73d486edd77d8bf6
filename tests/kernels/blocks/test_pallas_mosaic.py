"""The Mosaic GPU kernels against the reference."""

import jax
import jax.numpy as jnp
import pytest

from jaxmotion.kernels import blocks
from jaxmotion.kernels.blocks import _pallas_mosaic as mosaic
from jaxmotion.kernels.blocks._cases import Case
from jaxmotion.kernels.blocks._mosaic_tiles import make_grid
from jaxmotion.kernels.microscaling import MicroscalingOp
from jaxmotion.kernels.quantize import AbsmaxOp, MinMaxOp
from jaxmotion.kernels.rotate import RotateOp
from jaxmotion.kernels.sign import SignOp
from jaxmotion.kernels.ternary import TernaryOp
from tests.kernels.blocks.passes import (
  arguments,
  check_encoding,
  check_feedback,
  check_mean,
  check_sum,
  list_passes,
)
from tests.kernels.lowering import lower, mosaic_kernel_calls

FORCE = {"implementation": "pallas_mosaic"}
CASES = {
  "absmax8": Case(AbsmaxOp(bits=8, block=128), (32, 128), special=True),
  # Tiles of 4 blocks in planes of 6: the last two overlap.
  "overlap": Case(AbsmaxOp(bits=8, block=128), (24, 128)),
  "absmax6": Case(AbsmaxOp(bits=6, block=32), (128, 64)),
  "bfloat16": Case(AbsmaxOp(bits=8, block=32), (64, 64), "bfloat16"),
  "minmax": Case(MinMaxOp(bits=8, block=32, stochastic=True), (64, 64)),
  "sign": Case(SignOp(block=64), (256, 64)),
  "ternary": Case(TernaryOp(block=32), (160, 64)),
  "microscaling": Case(
    MicroscalingOp(format="float8_e4m3fn", block=32), (64, 64)
  ),
}
ALL = pytest.mark.parametrize("name", CASES)
# All forms of leaves; encoding covers what quantizers share.
SOME = pytest.mark.parametrize("name", ["absmax8", "minmax", "microscaling"])


@ALL
def test_interpreted_encoding_equals_the_reference(name):
  check_encoding(mosaic, CASES[name])


@pytest.mark.parametrize(
  ("name", "count"),
  [("absmax8", 0), ("absmax8", 1), ("minmax", 1), ("microscaling", 1)],
)
def test_interpreted_error_feedback_equals_the_reference(name, count):
  check_feedback(mosaic, CASES[name], count)


@pytest.mark.parametrize(
  ("name", "workers"),
  [("absmax8", 9), ("overlap", 2), ("minmax", 2), ("microscaling", 2)],
)
def test_interpreted_sums_equal_the_reference(name, workers):
  check_sum(mosaic, CASES[name], workers)


@SOME
def test_interpreted_means_equal_the_reference(name):
  check_mean(mosaic, CASES[name])


@SOME
def test_each_pass_is_one_kernel(name):
  for fn, argument in list_passes(CASES[name], "pallas_mosaic"):
    assert mosaic_kernel_calls(fn, argument) == 1


def test_the_other_kernels_are_the_default():
  op, x, key = arguments(CASES["absmax8"])
  text = lower(lambda x: blocks.encode(op, x, key), x)
  assert "mosaic_gpu" not in text


@pytest.mark.parametrize(
  ("width", "live", "span", "group"),
  [(32, 4, 32, 16), (96, 4, 32, 16), (512, 8, 128, 4), (512, 11, 256, 2)],
)
def test_tiles_fit_into_registers(width, live, span, group):
  op = AbsmaxOp(bits=8, block=width)
  like = jax.ShapeDtypeStruct((64, width), jnp.float32)
  grid = make_grid(op, like, live=live, reduces=True, interpret=True)
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
    check_feedback(mosaic, CASES["overlap"], 1)
