"""Passes over blocks as XLA makes them."""

import jax

from jaxmotion.core import Array, Key, PyTree, ShapedLike
from jaxmotion.kernels import _error_memory
from jaxmotion.kernels._block_op import BlockOp
from jaxmotion.kernels._error_memory import ErrorMemory, add_error


def encode(x: Array, key: Key | None, *, op: BlockOp) -> PyTree:
  """See `_api`."""
  return op.encode(x, key)


def encode_error(
  x: Array, memory: ErrorMemory, key: Key | None, *, op: BlockOp, decay: float
) -> tuple[PyTree, Array]:
  """See `_api`."""
  v = add_error(op.decode, x, memory, decay)
  return op.encode(v, key), v


def sum_decoded(payloads: PyTree, *, op: BlockOp, like: ShapedLike) -> Array:
  """See `_api`."""
  return _error_memory.sum_decoded(op.decode, payloads, like)


def encode_mean(
  payloads: PyTree, key: Key | None, *, op: BlockOp, like: ShapedLike
) -> PyTree:
  """See `_api`."""
  workers = jax.tree.leaves(payloads)[0].shape[0]
  mean = sum_decoded(payloads, op=op, like=like) / workers
  return op.encode(mean.astype(like.dtype), key)
