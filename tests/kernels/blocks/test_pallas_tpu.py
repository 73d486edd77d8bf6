"""The kernels for TPUs against the reference."""

import jax.numpy as jnp
import pytest

from jaxmotion.kernels import blocks
from jaxmotion.kernels.blocks import _pallas_tpu as tpu
from jaxmotion.kernels.blocks._cases import Case
from jaxmotion.kernels.blocks._tpu_tiles import make_grid
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
from tests.kernels.lowering import lower_for_tpu, tpu_kernel_calls

FORCE = {"implementation": "pallas_tpu"}
CASES = {
  # Two blocks in each row; two groups of rows, the last of which is not full.
  "rows": Case(AbsmaxOp(bits=8, block=512), (136, 1024)),
  "blocks": Case(AbsmaxOp(bits=4, block=128), (64, 128), special=True),
  "bfloat16": Case(AbsmaxOp(bits=8, block=128), (64, 256), "bfloat16"),
  "minmax": Case(MinMaxOp(bits=3, block=128, stochastic=True), (64, 256)),
  "sign": Case(SignOp(block=128), (64, 256)),
  "ternary": Case(TernaryOp(block=128), (40, 256)),
  "microscaling": Case(
    MicroscalingOp(format="float6_e2m3fn", block=128), (64, 128)
  ),
}
ALL = pytest.mark.parametrize("name", CASES)
# All forms of tiles and of leaves; encoding covers what quantizers share.
SOME = pytest.mark.parametrize("name", ["rows", "minmax", "microscaling"])


@ALL
def test_interpreted_encoding_equals_the_reference(name):
  check_encoding(tpu, CASES[name])


@pytest.mark.parametrize(
  ("name", "count"), [("blocks", 0), ("rows", 1), ("microscaling", 1)]
)
def test_interpreted_error_feedback_equals_the_reference(name, count):
  check_feedback(tpu, CASES[name], count)


@SOME
def test_interpreted_sums_equal_the_reference(name):
  check_sum(tpu, CASES[name], 3)


@SOME
def test_interpreted_means_equal_the_reference(name):
  check_mean(tpu, CASES[name])


@SOME
def test_each_pass_is_one_kernel(name):
  for fn, argument in list_passes(CASES[name], "pallas_tpu"):
    assert tpu_kernel_calls(fn, argument) == 1


def test_rows_of_the_array_are_rows_of_the_tiles():
  op, x, _ = arguments(CASES["rows"])
  grid = make_grid(op, x, by_rows=True)
  assert (grid.rows, grid.columns, grid.groups) == (34, 2, 2)


def test_the_reference_is_the_default():
  op, x, key = arguments(CASES["blocks"])
  text = lower_for_tpu(lambda x: blocks.encode(op, x, key), x)
  assert "tpu_custom_call" not in text


@pytest.mark.parametrize(
  ("op", "shape", "why"),
  [
    (AbsmaxOp(bits=8, block=128), (100,), "one block"),
    (AbsmaxOp(bits=8, block=128), (37, 128), "not 4 planes of whole blocks"),
    (AbsmaxOp(bits=8, block=32), (64, 64), "multiple of 128 values, got 32"),
    (SignOp(block=2048), (64, 2048), "at most 1048576 bytes .* got 2097152"),
    (
      RotateOp(op=AbsmaxOp(bits=8, block=128), length=128, seed=0),
      (64, 128),
      "neighbors in a row",
    ),
  ],
)
def test_what_kernels_cannot_take_says_so(op, shape, why):
  with pytest.raises(NotImplementedError, match=why):
    blocks.encode(op, jnp.zeros(shape), **FORCE)
