"""The Triton kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.kernels.arrays import ENCODED as CASES
from jaxmotion.kernels import ErrorMemory, blocks
from jaxmotion.kernels.quantize import AbsmaxOp
from tests.kernels.blocks import passes
from tests.kernels.blocks.passes import PASSES, check, check_pass, encoded
from tests.kernels.lowering import interpret, kernel_calls, on_gpus

FORCE = {"implementation": "pallas_triton"}
# One op of each kind; encoding all cases covers what their variants share.
KINDS = (
  "absmax8",
  "minmax3_stochastic",
  "sign",
  "ternary",
  "mx_float6_e2m3fn",
  "rotated_absmax4",
)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_encoding_equals_the_reference(name):
  check_pass("encode", CASES[name], "pallas_triton")


@pytest.mark.parametrize(
  ("step", "name", "sizes"),
  [
    *((step, name, {}) for step in PASSES[1:] for name in KINDS),
    ("error", "absmax8", {"count": 0}),
    ("sum", "absmax8", {"workers": 9}),
  ],
)
def test_other_interpreted_passes_equal_the_reference(step, name, sizes):
  check_pass(step, CASES[name], "pallas_triton", **sizes)


def test_padding_is_not_summed_or_overwritten():
  case = CASES["absmax8_odd"]
  x = jnp.asarray(case.array())
  payload = encoded(case.op, x, None)
  one = jax.tree.map(lambda a: a[None], payload)
  total = interpret(blocks.sum_decoded)(case.op, one, x, **FORCE)
  decoded = jax.jit(lambda p: case.op.decode(p, x))(payload)
  np.testing.assert_array_equal(total, decoded)
  with pytest.raises(NotImplementedError, match="not 4 planes of whole"):
    memory = ErrorMemory(jnp.int32(1), x, payload)
    blocks.encode_error(case.op, x, memory, **FORCE)


@pytest.mark.parametrize(("name", "gpu"), on_gpus(KINDS))
def test_each_pass_is_one_kernel(name, gpu):
  for step in PASSES:
    fn, argument = passes.find_pass(step, CASES[name], "pallas_triton")
    assert kernel_calls(fn, argument, gpu=gpu) == 1


# `test_each_pass_is_one_kernel` lowers the others.
@pytest.mark.parametrize("name", [c for c in CASES if c not in KINDS])
def test_every_case_lowers(name):
  fn, x = passes.find_pass("encode", CASES[name], "pallas_triton")
  assert kernel_calls(fn, x) == 1


def test_kernels_run_under_vmap_and_shard_map():
  op = AbsmaxOp(bits=4, block=32)
  x = jnp.asarray(
    np.random.default_rng(0).normal(size=(3, 16, 64)), jnp.float32
  )
  encode = lambda x: blocks.encode(op, x, **FORCE)
  got = jax.jit(jax.vmap(interpret(encode)))(x)
  check(op, got, jax.vmap(lambda x: op.encode(x, None))(x))
  mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
  spread = jax.shard_map(
    lambda x: encode(x[0]),
    mesh=mesh,
    in_specs=P("data"),
    out_specs=P("data"),
  )
  traced = jax.jit(spread).trace(x[:1])
  assert "pallas_call" in str(traced.jaxpr)


@pytest.mark.parametrize(
  ("op", "shape", "why"),
  [
    (AbsmaxOp(bits=8, block=32), (20,), "one block"),
    (AbsmaxOp(bits=8, block=32), (0,), "one block"),
    (AbsmaxOp(bits=1, block=2048), (64, 2048), "at most 32768"),
  ],
)
def test_what_kernels_cannot_take_says_so(op, shape, why):
  with pytest.raises(NotImplementedError, match=why):
    blocks.encode(op, jnp.zeros(shape), **FORCE)
