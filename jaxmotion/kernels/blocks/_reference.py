"""Block passes as plain `jax.numpy`, which XLA compiles and fuses."""

import functools
import math
from collections.abc import Callable

from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_layout, _block_op, _error_memory
from jaxmotion.kernels.blocks import _mean_chunks, _passes


def encode(x: Array, key: core.Key | None, *, op: _block_op.BlockOp) -> PyTree:
  """Encodes an array with the op's reference."""
  return core.trace_in_place(op.encode)(x, key)


def encode_error(
  x: Array,
  memory: _error_memory.ErrorMemory,
  key: core.Key | None,
  *,
  op: _block_op.BlockOp,
  decay: float,
) -> tuple[PyTree, Array]:
  """Encodes an array plus its remembered error; returns payload and sum."""
  decode_sent = lambda payload, like: decode(payload, op=op, like=like)
  shape = op.decoded_shape(tuple(x.shape))
  v = _error_memory.add_error_in_blocks(decode_sent, x, memory, decay, shape)
  return core.trace_in_place(op.encode)(v, key), v


def decode(
  payload: PyTree, *, op: _block_op.BlockOp, like: ShapedLike
) -> Array:
  """Decodes a payload with the op's reference."""
  return _read_blocks(core.trace_in_place(op.decode), payload, op, like)


def sum_decoded(
  payloads: PyTree, *, op: _block_op.BlockOp, like: ShapedLike
) -> Array:
  """Decodes the payloads of several workers and adds them in their order."""

  def add_up(payloads: PyTree, like: ShapedLike) -> Array:
    return _error_memory.sum_decoded(op.decode, payloads, like)

  return _read_blocks(add_up, payloads, op, like)


def encode_mean(
  payloads: PyTree,
  key: core.Key | None,
  *,
  op: _block_op.BlockOp,
  like: ShapedLike,
) -> PyTree:
  """Decodes the payloads of several workers and encodes their mean."""

  def average(payloads: PyTree) -> Array:
    total = sum_decoded(payloads, op=op, like=like)
    return (total / _passes.count_workers(payloads)).astype(like.dtype)

  def encode_whole(payloads: PyTree) -> PyTree:
    # XLA:CPU would decode once for the scales and once for the codes. Where
    # codes are padded, that takes no vector instructions (10x).
    is_large = math.prod(like.shape) >= _mean_chunks.MIN_APART
    mean = (
      core.write_apart(average, payloads) if is_large else average(payloads)
    )
    return op.encode(mean, key)

  found = _mean_chunks.find_chunk(op, payloads, like)
  if found is None:
    return encode_whole(payloads)
  layout, blocks = found
  in_chunks = functools.partial(
    _mean_chunks.encode_chunks, op=op, like=like, layout=layout, blocks=blocks
  )
  return lax.platform_dependent(payloads, cpu=in_chunks, default=encode_whole)


def _read_blocks(
  decode: Callable[[PyTree, ShapedLike], Array],
  payload: PyTree,
  op: _block_op.BlockOp,
  like: ShapedLike,
) -> Array:
  """Returns `decode(payload, like)`, computed block by block if it can be."""
  shape = op.decoded_shape(tuple(like.shape))
  if shape is None:
    return decode(payload, like)
  return _block_layout.read_blocks(decode, payload, shape, like)
