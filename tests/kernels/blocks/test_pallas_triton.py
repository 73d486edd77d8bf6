"""The Triton kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmotion.kernels import ErrorMemory, blocks
from jaxmotion.kernels.blocks import _pallas_triton as triton
from jaxmotion.kernels.blocks._cases import CASES
from jaxmotion.kernels.quantize import AbsmaxOp
from tests.kernels.blocks.passes import (
  arguments,
  check,
  check_encoding,
  check_feedback,
  check_mean,
  check_sum,
  encoded,
  list_passes,
)
from tests.kernels.lowering import kernel_calls, on_gpus

ALL = pytest.mark.parametrize("name", CASES)
# One op of each kind; encoding all cases covers what their variants share.
PASSES = (
  "absmax8",
  "minmax3_stochastic",
  "sign",
  "ternary",
  "mx_float6_e2m3fn",
  "rotated_absmax4",
)
SOME = pytest.mark.parametrize("name", PASSES)


@ALL
def test_interpreted_encoding_equals_the_reference(name):
  check_encoding(triton, CASES[name])


@pytest.mark.parametrize(
  ("name", "count"), [("absmax8", 0), *((name, 1) for name in PASSES)]
)
def test_interpreted_error_feedback_equals_the_reference(name, count):
  check_feedback(triton, CASES[name], count)


@pytest.mark.parametrize(
  ("name", "workers"), [("absmax8", 9), *((name, 2) for name in PASSES)]
)
def test_interpreted_sums_equal_the_reference(name, workers):
  check_sum(triton, CASES[name], workers)


@SOME
def test_interpreted_means_equal_the_reference(name):
  check_mean(triton, CASES[name])


def test_padding_is_not_summed_or_overwritten():
  case = CASES["absmax8_odd"]
  x = jnp.asarray(case.array())
  payload = encoded(case.op, x, None)
  one = jax.tree.map(lambda a: a[None], payload)
  total = triton.sum_decoded(one, op=case.op, like=x, interpret=True)
  decoded = jax.jit(lambda p: case.op.decode(p, x))(payload)
  np.testing.assert_array_equal(total, decoded)
  with pytest.raises(NotImplementedError, match="not 4 planes of whole"):
    memory = ErrorMemory(jnp.int32(1), x, payload)
    triton.encode_error(x, memory, None, op=case.op, decay=1.0)


@pytest.mark.parametrize(("name", "gpu"), on_gpus(PASSES))
def test_each_pass_is_one_kernel(name, gpu):
  for fn, argument in list_passes(CASES[name], "pallas_triton"):
    assert kernel_calls(fn, argument, gpu=gpu) == 1


# `test_each_pass_is_one_kernel` lowers the others.
@pytest.mark.parametrize("name", [c for c in CASES if c not in PASSES])
def test_every_case_lowers(name):
  op, x, key = arguments(CASES[name])
  force = {"implementation": "pallas_triton"}
  assert kernel_calls(lambda x: blocks.encode(op, x, key, **force), x) == 1


def test_kernels_run_under_vmap_and_shard_map():
  op = AbsmaxOp(bits=4, block=32)
  x = jnp.asarray(
    np.random.default_rng(0).normal(size=(3, 16, 64)), jnp.float32
  )
  encode = lambda x: triton.encode(x, None, op=op, interpret=True)
  got = jax.jit(jax.vmap(encode))(x)
  check(op, got, jax.vmap(lambda x: op.encode(x, None))(x))
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
  spread = jax.shard_map(
    lambda x: blocks.encode(op, x[0], implementation="pallas_triton"),
    mesh=mesh,
    in_specs=P("data"),
    out_specs=P("data"),
  )
  traced = jax.jit(spread).trace(x[:1])
  assert "pallas_call" in str(traced.jaxpr)


@pytest.mark.parametrize(
  ("shape", "why"),
  [
    ((20,), "one block"),
    ((0,), "one block"),
  ],
)
def test_what_kernels_cannot_take_says_so(shape, why):
  op = AbsmaxOp(bits=8, block=32)
  with pytest.raises(NotImplementedError, match=why):
    blocks.encode(op, jnp.zeros(shape), implementation="pallas_triton")


def test_blocks_beyond_registers_are_refused():
  with pytest.raises(NotImplementedError, match="at most 32768"):
    op = AbsmaxOp(bits=1, block=2048)
    blocks.encode(op, jnp.zeros((64, 2048)), implementation="pallas_triton")
