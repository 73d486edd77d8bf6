"""Public functions of the block passes, which choose an implementation."""

import functools
from typing import Any

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op, _checks, _dispatch, _error_memory
from jaxmotion.kernels.blocks import _pallas_triton, _reference

_TABLE = {"reference": _reference, "pallas_triton": _pallas_triton}
_OP = core.instance(_block_op.BlockOp, "a BlockOp")
# Compiled for an H100, XLA reads its input for scales and again for the codes,
# writes the sum with the error in between, and copies each worker's part of the
# payloads before it adds them up.
# Without checks: codecs check what they are given.
encode_pass, encode_error_pass, sum_pass, mean_pass = (
  functools.partial(_dispatch.dispatch, _TABLE, name)
  for name in ("encode", "encode_error", "sum_decoded", "encode_mean")
)


@core.declare(op=_OP, x=core.float_array, key=core.optional_key)
def encode(
  op: _block_op.BlockOp,
  x: Array,
  key: core.Key | None = None,
  *,
  implementation: str | None = None,
) -> PyTree:
  """Encodes an array in one pass that reads it and writes its payload.

  Args:
    op: the quantizer.
    x: floating array of any shape.
    key: randomness, for an op with `needs_key`.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    The op's payload. Every implementation returns the same bits, except for
    scales that are sums, which are added up in another order. `SignOp` and the
    threshold of `TernaryOp` have such scales.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion.kernels.quantize import AbsmaxOp
    >>> op = AbsmaxOp(bits=8, block=2)
    >>> encode(op, jnp.array([1.0, 2.0, 3.0, 4.0])).words.shape
    (1, 1, 1)
  """
  _checks.check_key(key, op.needs_key)
  return encode_pass(x, key, op=op, implementation=implementation)


@core.declare(
  op=_OP,
  x=core.float_array,
  memory=core.instance(_error_memory.ErrorMemory, "an ErrorMemory"),
  key=core.optional_key,
  decay=core.number(0, 1),
)
def encode_error(
  op: _block_op.BlockOp,
  x: Array,
  memory: _error_memory.ErrorMemory,
  key: core.Key | None = None,
  *,
  decay: float = 1.0,
  implementation: str | None = None,
) -> tuple[PyTree, Array]:
  """Encodes an array plus its remembered error, in one pass.

  Args:
    op: the quantizer.
    x: floating array of any shape.
    memory: error memory of that array; `sent` is a payload of this op.
    key: randomness, for an op with `needs_key`.
    decay: factor on the error.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    The payload and the value that it encodes, float32. Both reuse the buffers
    of `memory` if that is donated.
  """
  _checks.check_key(key, op.needs_key)
  _checks.check_memory(x, memory, _block_op.describe_payload(op, x))
  return encode_error_pass(
    x, memory, key, op=op, implementation=implementation, decay=decay
  )


@core.declare(op=_OP, like=core.float_array)
def payload_like(op: _block_op.BlockOp, like: ShapedLike) -> PyTree:
  """Returns the payload of an array, its leaves as ShapeDtypeStructs.

  Args:
    op: the quantizer.
    like: shape and dtype of the array.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion.kernels.sign import SignOp
    >>> payload_like(SignOp(block=8), jnp.ones((8, 32))).words.shape
    (1, 1, 8)
  """
  return _block_op.describe_payload(op, like)


@core.declare(op=_OP, like=core.float_array)
def decode(op: _block_op.BlockOp, payload: PyTree, like: ShapedLike) -> Array:
  """Decodes a payload of an array.

  Args:
    op: the quantizer.
    payload: what `encode` returned.
    like: shape and dtype of the array that was encoded.

  Returns:
    The array, in the dtype of `like`.
  """
  wanted = _block_op.describe_payload(op, like)
  _checks.check_payload("payload", payload, wanted)
  return _reference.decode_pass(payload, op=op, like=like)


@core.declare(op=_OP, like=core.float_array)
def sum_decoded(
  op: _block_op.BlockOp,
  payloads: PyTree,
  like: ShapedLike,
  *,
  implementation: str | None = None,
) -> Array:
  """Decodes the payloads of several workers and adds them, in one pass.

  Args:
    op: the quantizer.
    payloads: a payload whose leaves have a leading axis of workers.
    like: shape and dtype of the array that each worker encoded.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    The sum in the order of workers, in float32 or the wider dtype of `like`.
  """
  _check_payloads(op, payloads, like)
  return sum_pass(payloads, op=op, implementation=implementation, like=like)


@core.declare(op=_OP, like=core.float_array, key=core.optional_key)
def encode_mean(
  op: _block_op.BlockOp,
  payloads: PyTree,
  like: ShapedLike,
  key: core.Key | None = None,
  *,
  implementation: str | None = None,
) -> PyTree:
  """Encodes the mean of several workers' decoded payloads, in one pass.

  Args:
    op: the quantizer.
    payloads: a payload whose leaves have a leading axis of workers.
    like: shape and dtype of the array that each worker encoded.
    key: randomness, for an op with `needs_key`.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    The payload of the mean.
  """
  _check_payloads(op, payloads, like)
  _checks.check_key(key, op.needs_key)
  return mean_pass(
    payloads, key, op=op, implementation=implementation, like=like
  )


def _check_payloads(
  op: _block_op.BlockOp, payloads: Any, like: ShapedLike
) -> None:
  wanted = _block_op.describe_payload(op, like)
  _checks.check_payload("payloads", payloads, wanted, workers=True)
