"""Tests of block passes whose blocks follow no rows, or are padded."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.kernels import blocks, is_read_slowly
from jaxmotion.kernels.quantize import AbsmaxOp, MinMaxOp
from jaxmotion.kernels.sign import SignOp
from jaxmotion.kernels.ternary import TernaryOp

OPS = [
  AbsmaxOp(bits=8, block=512),
  MinMaxOp(bits=3, block=512),
  SignOp(block=512),
  TernaryOp(block=512, stochastic=False),
]


@pytest.mark.parametrize(
  ("op", "shape"),
  [*zip(OPS, [(40003,), (3, 20001)] * 2, strict=True)],
  ids=str,
)
def test_values_written_apart_are_those_that_the_op_decodes(op, shape):
  assert is_read_slowly(shape, *op.decoded_shape(shape))
  x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)

  @jax.jit
  def decode_all(x):
    payload = op.encode(x, None)
    pair = jax.tree.map(lambda a: jnp.stack([a, a]), payload)
    one = op.decode(payload, x)
    alike = blocks.decode(op, payload, x), blocks.sum_decoded(op, pair, x)
    return alike, (one, one + one)

  found, right = decode_all(x)
  jax.tree.map(np.testing.assert_array_equal, found, right)


# 342 rows are no planes of whole rows.
@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_a_padded_mean_is_decoded_once_into_memory(op):
  like = jax.ShapeDtypeStruct((342, 512), jnp.float32)
  assert math.prod(op.decoded_shape(like.shape)) > like.size
  payload = jax.eval_shape(lambda x: op.encode(x, None), like)
  pair = jax.tree.map(lambda a: a.update(shape=(2, *a.shape)), payload)
  encode_mean = jax.jit(lambda pair: blocks.encode_mean(op, pair, like))
  memory = encode_mean.lower(pair).compile().memory_analysis()
  assert memory.temp_size_in_bytes >= 4 * like.size


def test_bfloat16_terms_of_a_sum_are_rounded_by_what_xla_keeps():
  op, like = OPS[0], jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16)
  payload = jax.eval_shape(lambda x: op.encode(x, None), like)
  pair = jax.tree.map(lambda a: a.update(shape=(2, *a.shape)), payload)
  add = jax.jit(lambda pair: blocks.sum_decoded(op, pair, like))
  # A cast to bfloat16 and back is left out where XLA takes it for excess.
  assert "reduce-precision" in add.lower(pair).compile().as_text()
