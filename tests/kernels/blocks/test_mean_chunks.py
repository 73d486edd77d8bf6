"""Tests of means that are encoded some blocks at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.kernels import blocks
from jaxmotion.kernels.blocks import _reference
from jaxmotion.kernels.microscaling import MicroscalingOp
from jaxmotion.kernels.quantize import AbsmaxOp, MinMaxOp
from jaxmotion.kernels.rotate import RotateOp
from jaxmotion.kernels.sign import SignOp
from jaxmotion.kernels.ternary import TernaryOp
from tests.kernels.blocks.passes import check, payloads_of

OPS = {
  "absmax8": AbsmaxOp(bits=8, block=32),
  "minmax3": MinMaxOp(bits=3, block=32),
  "sign": SignOp(block=32),
  "mx6": MicroscalingOp(format="float6_e3m2fn", block=32),
}


@pytest.fixture
def small_chunks(monkeypatch):
  monkeypatch.setattr(_reference, "MIN_APART", 1)
  monkeypatch.setattr(_reference, "_MAX_APART", 1)
  monkeypatch.setattr(_reference, "_CHUNK", 1 << 9)


def encode_whole(op, payloads, like):
  total = blocks.sum_decoded(op, payloads, like)
  return op.encode((total / 3).astype(like.dtype), None)


# A mean is rounded to its dtype before the op sees it: one op shows that.
@pytest.mark.parametrize(
  ("name", "dtype"),
  [(name, "bfloat16" if name == "absmax8" else "float32") for name in OPS],
)
def test_chunks_encode_the_bits_of_the_whole_mean(small_chunks, name, dtype):
  # Seven blocks of a plane, which no number of chunks divides.
  op = OPS[name]
  shape = 7 * op.planes, 32
  x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
  x = jnp.asarray(x, dtype)
  payloads = payloads_of(op, x, None, 3)
  layout, count = _reference.find_chunk(op, payloads, x)
  assert count < layout.blocks
  got = jax.jit(lambda p: blocks.encode_mean(op, p, x))(payloads)
  check(op, got, jax.jit(lambda p: encode_whole(op, p, x))(payloads))


@pytest.mark.parametrize(
  "op, shape",
  [
    (AbsmaxOp(bits=8, block=32), (37, 29)),
    (AbsmaxOp(bits=8, block=32, stochastic=True), (64, 32)),
    (RotateOp(op=AbsmaxOp(bits=4, block=32), length=32, seed=0), (64, 32)),
    (TernaryOp(block=32, stochastic=False), (37, 29)),
    (SignOp(block=1024), (4, 8)),
  ],
  ids=["padded", "stochastic", "rotated", "ternary", "one_block"],
)
def test_arrays_that_need_a_whole_mean_are_not_cut(small_chunks, op, shape):
  assert _reference.find_chunk(op, (), jnp.zeros(shape)) is None


def test_a_large_mean_needs_no_memory_of_its_size():
  op, like = SignOp(block=1024), jax.ShapeDtypeStruct((8192, 1024), "float32")
  payload = jax.eval_shape(lambda x: op.encode(x, None), like)
  payloads = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), payload
  )
  mean = jax.jit(lambda p: blocks.encode_mean(op, p, like))
  analysis = mean.lower(payloads).compile().memory_analysis()
  assert analysis.temp_size_in_bytes < like.size
