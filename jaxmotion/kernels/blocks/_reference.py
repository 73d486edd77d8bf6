"""Block passes as plain `jax.numpy`, which XLA compiles and fuses."""

import functools
import math
from collections.abc import Callable

from jax import lax

from jaxmotion.core import (
  Array,
  Key,
  PyTree,
  ShapedLike,
  trace_in_place,
  write_apart,
)
from jaxmotion.kernels import _error_memory
from jaxmotion.kernels._block_layout import read_blocks
from jaxmotion.kernels._block_op import BlockOp
from jaxmotion.kernels._error_memory import ErrorMemory, add_error_in_blocks
from jaxmotion.kernels.blocks._mean_chunks import (
  MIN_APART,
  encode_chunks,
  find_chunk,
)
from jaxmotion.kernels.blocks._passes import count_workers


def encode(x: Array, key: Key | None, *, op: BlockOp) -> PyTree:
  """Encodes an array with the op's reference."""
  return trace_in_place(op.encode)(x, key)


def encode_error(
  x: Array, memory: ErrorMemory, key: Key | None, *, op: BlockOp, decay: float
) -> tuple[PyTree, Array]:
  """Encodes an array plus its remembered error; returns payload and sum."""
  decode_sent = lambda payload, like: decode(payload, op=op, like=like)
  shape = op.decoded_shape(tuple(x.shape))
  v = add_error_in_blocks(decode_sent, x, memory, decay, shape)
  return trace_in_place(op.encode)(v, key), v


def decode(payload: PyTree, *, op: BlockOp, like: ShapedLike) -> Array:
  """Decodes a payload with the op's reference."""
  return _read_blocks(trace_in_place(op.decode), payload, op, like)


def sum_decoded(payloads: PyTree, *, op: BlockOp, like: ShapedLike) -> Array:
  """Decodes the payloads of several workers and adds them in their order."""

  def add_up(payloads: PyTree, like: ShapedLike) -> Array:
    return _error_memory.sum_decoded(op.decode, payloads, like)

  return _read_blocks(add_up, payloads, op, like)


def encode_mean(
  payloads: PyTree, key: Key | None, *, op: BlockOp, like: ShapedLike
) -> PyTree:
  """Decodes the payloads of several workers and encodes their mean."""

  def average(payloads: PyTree) -> Array:
    total = sum_decoded(payloads, op=op, like=like)
    return (total / count_workers(payloads)).astype(like.dtype)

  def encode_whole(payloads: PyTree) -> PyTree:
    # XLA:CPU would decode once for the scales and once for the codes. Where
    # codes are padded, that takes no vector instructions (10x).
    is_large = math.prod(like.shape) >= MIN_APART
    mean = write_apart(average, payloads) if is_large else average(payloads)
    return op.encode(mean, key)

  found = find_chunk(op, payloads, like)
  if found is None:
    return encode_whole(payloads)
  layout, blocks = found
  in_chunks = functools.partial(
    encode_chunks, op=op, like=like, layout=layout, blocks=blocks
  )
  return lax.platform_dependent(payloads, cpu=in_chunks, default=encode_whole)


def _read_blocks(
  decode: Callable[[PyTree, ShapedLike], Array],
  payload: PyTree,
  op: BlockOp,
  like: ShapedLike,
) -> Array:
  """Returns `decode(payload, like)`, computed block by block if it can be."""
  shape = op.decoded_shape(tuple(like.shape))
  if shape is None:
    return decode(payload, like)
  return read_blocks(decode, payload, shape, like)
