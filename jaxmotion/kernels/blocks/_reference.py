"""Block passes as plain `jax.numpy`, which XLA compiles and fuses."""

import jax

from jaxmotion.core import Array, Key, PyTree, ShapedLike
from jaxmotion.kernels import _error_memory
from jaxmotion.kernels._block_op import BlockOp
from jaxmotion.kernels._error_memory import ErrorMemory, add_error


def encode(x: Array, key: Key | None, *, op: BlockOp) -> PyTree:
  """Encodes an array with the op's reference."""
  return op.encode(x, key)


def encode_error(
  x: Array, memory: ErrorMemory, key: Key | None, *, op: BlockOp, decay: float
) -> tuple[PyTree, Array]:
  """Encodes an array plus its remembered error; returns payload and sum."""
  v = add_error(op.decode, x, memory, decay)
  return op.encode(v, key), v


def sum_decoded(payloads: PyTree, *, op: BlockOp, like: ShapedLike) -> Array:
  """Decodes the payloads of several workers and adds them in their order."""
  return _error_memory.sum_decoded(op.decode, payloads, like)


def encode_mean(
  payloads: PyTree, key: Key | None, *, op: BlockOp, like: ShapedLike
) -> PyTree:
  """Decodes the payloads of several workers and encodes their mean."""
  workers = jax.tree.leaves(payloads)[0].shape[0]
  mean = sum_decoded(payloads, op=op, like=like) / workers
  return op.encode(mean.astype(like.dtype), key)
