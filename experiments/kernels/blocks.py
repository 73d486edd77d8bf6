"""Ops of passes over blocks: encoding, with error memory, sums and means."""

import functools
from typing import Any

import jax.numpy as jnp

from experiments.kernels import arrays, ops
from jaxmotion import core, kernels, make_key
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import (
  blocks,
  microscaling,
  quantize,
  rotate,
  sign,
  ternary,
)

# One array for each shape, dtype and kind of elements.
_ARRAYS = {
  f"{case.shape} {case.dtype}{' special' * case.special}": functools.partial(
    lambda case: case.array().astype(case.dtype), case
  )
  for case in arrays.ENCODED.values()
}
_OPS = {
  **{
    f"int{bits}": quantize.AbsmaxOp(bits=bits, block=512)
    for bits in (1, 2, 3, 4, 5, 6, 7, 8)
  },
  "int4_stochastic": quantize.AbsmaxOp(bits=4, block=512, stochastic=True),
  "int8_stochastic": quantize.AbsmaxOp(bits=8, block=512, stochastic=True),
  "int4_minmax": quantize.MinMaxOp(bits=4, block=512),
  "int8_minmax": quantize.MinMaxOp(bits=8, block=512),
  "mxfp8": microscaling.MicroscalingOp(format="float8_e4m3fn", block=32),
  "mxfp6": microscaling.MicroscalingOp(format="float6_e3m2fn", block=32),
  "mxfp4": microscaling.MicroscalingOp(format="float4_e2m1fn", block=32),
  "int4_rotated": rotate.RotateOp(
    op=quantize.AbsmaxOp(bits=4, block=512), length=128, seed=0
  ),
  "sign": sign.SignOp(block=1024),
  "ternary": ternary.TernaryOp(block=1024),
  "ternary_threshold": ternary.TernaryOp(block=1024, stochastic=False),
}
# Block ops whose sums, means and encoding with error memory are timed too.
_EVERY_PASS = ("int8", "int4", "mxfp8", "sign")
# Their scales are sums of some thousand elements, in an order that depends on
# the implementation.
_SUMS, _SUM_TOLERANCE = ("sign", "ternary_threshold"), 1e-5


def list_ops() -> list[ops.Op]:
  """Returns the ops of passes over blocks."""
  return [op for name in _OPS for op in _block_ops(name)]


def _block_ops(name: str) -> list[ops.Op]:
  """Returns encoding and, for some ops, error memory, sums and means."""
  op = _OPS[name]
  tolerance = _SUM_TOLERANCE if name in _SUMS else 0.0

  def encode(
    like: ShapedLike, x: Array, key: core.Key | None, **options: Any
  ) -> PyTree:
    return blocks.encode(op, x, key, **options)

  def encode_error(
    like: ShapedLike, x: Array, memory: kernels.ErrorMemory, **options: Any
  ) -> tuple[PyTree, Array]:
    return blocks.encode_error(op, x, memory, **options)

  def make_error_args(x: Array) -> tuple[PyTree, ...]:
    value = x.astype(jnp.float32)[..., ::-1]
    sent = blocks.encode(op, value)
    return x, kernels.ErrorMemory(jnp.int32(1), value, sent)

  def feed_sent(
    outputs: PyTree, args: tuple[PyTree, ...]
  ) -> tuple[PyTree, ...]:
    (sent, value), (x, memory) = outputs, args
    return x, kernels.ErrorMemory(memory.count, value, sent)

  def sum_decoded(like: ShapedLike, payloads: PyTree, **options: Any) -> Array:
    return blocks.sum_decoded(op, payloads, like, **options)

  def encode_mean(like: ShapedLike, payloads: PyTree, **options: Any) -> PyTree:
    return blocks.encode_mean(op, payloads, like, **options)

  make_args = lambda x: (x, make_key(0) if op.needs_key else None)
  found = [ops.Op(name, encode, make_args, _ARRAYS, tolerance=tolerance)]
  if name not in _EVERY_PASS:
    return found
  stack = ops.stack_payloads(lambda x: blocks.encode(op, x))
  make_payloads = lambda x: (stack(x),)
  return [
    *found,
    ops.Op(
      *(f"{name}_feedback", encode_error, make_error_args, _ARRAYS),
      feed=feed_sent,
      tolerance=tolerance,
    ),
    ops.Op(f"{name}_sum", sum_decoded, make_payloads, _ARRAYS),
    ops.Op(
      *(f"{name}_mean", encode_mean, make_payloads, _ARRAYS),
      tolerance=tolerance,
    ),
  ]
