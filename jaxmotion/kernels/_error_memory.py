"""Error memory, and sums of decoded payloads, for any codec.

Error feedback adds the error of the last encoding, e = v - decode(sent), to the
next value. Storing e takes a pass that decodes `sent`, one that writes e, and
the encode pass that reads it. `ErrorMemory` stores v and `sent` instead. The
next encode pass computes e while it reads them, and writes the new v in place
of the old one. It saves two passes over the array and a temporary.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_layout

# Up to this many payloads are decoded by separate code each, which fuses into
# one pass; beyond, a loop keeps the program short.
_MAX_UNROLL = 16
# The same limit inside a kernel, where each payload takes registers.
MAX_UNROLL_IN_KERNEL = 8


class ErrorMemory(NamedTuple):
  """Error of one array, stored lazily: error = value - decode(sent).

  Attributes:
    count: int32[], encodings so far; nothing was sent before the first.
    value: float32 of the array's shape, the last value to be encoded.
    sent: the payload of that value; `()` if `value` is the error itself.
  """

  count: Array  # type: ignore[assignment]
  value: Array
  sent: PyTree = ()


def count_encoding(count: Array) -> Array:
  """Returns the number of encodings after one more, at most 2**31 - 1."""
  return lax.min(count, np.int32(2**31 - 2)) + np.int32(1)


def clear_error(error: Array) -> Array:
  """Returns the error with 0 in place of non-finite elements."""
  return core.select_or(jnp.isfinite(error), error, 0.0)


def error_of(decode: Callable[..., Array], memory: ErrorMemory) -> Array:
  """Returns the remembered error, float32 of the array's shape.

  Args:
    decode: (payload, like) -> array.
    memory: error memory of one array.
  """
  if not jax.tree.leaves(memory.sent):
    return memory.value
  error = clear_error(memory.value - decode(memory.sent, memory.value))
  # Before the first encoding `sent` is zeros, and a codec may decode a payload
  # of zeros to anything: the error is 0 by definition.
  return core.select_or(memory.count > 0, error, 0.0)


def add_error(
  decode: Callable[..., Array], x: Array, memory: ErrorMemory, decay: float
) -> Array:
  """Returns x + decay * error, float32, in the buffer of `memory.value`.

  Args:
    decode: (payload, like) -> array.
    x: floating array.
    memory: error memory of that array.
    decay: factor on the error.
  """

  def add_to_x(value: Array, sent: PyTree) -> Array:
    error = error_of(decode, ErrorMemory(memory.count, value, sent))
    return x.astype(jnp.float32) + (error if decay == 1 else error * decay)

  return hosts.update_in_place(
    core.trace_in_place(add_to_x), memory.value, memory.sent, memory.count
  )


def add_error_in_blocks(
  decode: Callable[..., Array],
  x: Array,
  memory: ErrorMemory,
  decay: float,
  shape: tuple[int, int, int] | None,
) -> Array:
  """Returns what `add_error` does, computed in blocks if that is faster.

  Args:
    decode: (payload, like) -> array, where `like` may have the shape of blocks.
    x: floating array.
    memory: error memory of that array.
    decay: factor on the error.
    shape: planes, blocks per plane and elements per block; None if only the
      array itself can be decoded.
  """
  if (
    shape is None
    or math.prod(shape) != x.size
    or not _block_layout.is_read_slowly(x.shape, *shape)
  ):
    return add_error(decode, x, memory, decay)
  cut = memory._replace(value=memory.value.reshape(shape))
  return add_error(decode, x.reshape(shape), cut, decay).reshape(x.shape)


def sum_decoded(
  decode: Callable[..., Array], payloads: PyTree, like: ShapedLike
) -> Array:
  """Decodes payloads of several workers and adds them, in their order.

  Args:
    decode: (payload, like) -> array.
    payloads: a payload whose leaves have a leading axis of workers.
    like: shape and dtype of the array that each worker encoded.

  Returns:
    The sum, in float32 or the wider dtype of `like`.
  """
  dtype = jnp.promote_types(like.dtype, jnp.float32)
  workers = jax.tree.leaves(payloads)[0].shape[0]
  own = jnp.finfo(like.dtype)

  def decode_worker(worker: Any) -> Array:
    take = lax.index_in_dim
    if not isinstance(worker, int):
      take = lax.dynamic_index_in_dim
    payload = jax.tree.map(lambda a: take(a, worker, keepdims=False), payloads)
    y = decode(payload, like).astype(dtype)
    # XLA leaves out a cast to a narrower float and back, here on a GPU. Then
    # its sums would not be those of the kernels and of hosts.
    return lax.reduce_precision(y, own.nexp, own.nmant) if own.bits < 32 else y

  return add_in_order(decode_worker, workers, _MAX_UNROLL)


def add_in_order(
  term: Callable[[Any], PyTree], count: int, max_unroll: int
) -> PyTree:
  """Returns term(0) + term(1) + ..., added from the left."""
  # The order is fixed so that every implementation and every worker gets the
  # same bits.
  total = term(0)
  if count <= max_unroll:
    for i in range(1, count):
      total = jax.tree.map(jnp.add, total, term(i))
    return total

  def add_term(i: Any, total: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, term(i))

  return lax.fori_loop(1, count, add_term, total)
