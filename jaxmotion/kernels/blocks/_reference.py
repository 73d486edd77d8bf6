"""Block passes as plain `jax.numpy`, which XLA compiles and fuses."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_layout, _block_op, _error_memory

MIN_APART = 1 << 15
"""Elements from which a mean is written to memory; fewer are one expression."""

# Larger arrays are a loop over buffers of _CHUNK elements.
_MAX_APART, _CHUNK = 1 << 22, 1 << 19


def find_chunk(
  op: _block_op.BlockOp, payloads: PyTree, like: ShapedLike
) -> tuple[_block_op.BlockLayout, int] | None:
  """Returns how a mean is cut: the array's layout and a chunk's blocks."""
  # None if the mean must be encoded as a whole. This is so if blocks are
  # padded, depend on where they stand, or would be cut otherwise without their
  # neighbors.
  if op.uses_positions or any(
    core.is_compiler_partitioned(a) for a in jax.tree.leaves(payloads)
  ):
    return None
  try:
    layout = op.layout(tuple(like.shape))
    if layout.is_padded or layout.size < MIN_APART:
      return None
    chunks = 1 if layout.size <= _MAX_APART else -(-layout.size // _CHUNK)
    blocks = -(-layout.blocks // chunks)
    shape = layout.planes, blocks, layout.width
    cut = op.layout(shape)
  except NotImplementedError:
    return None
  same = cut[:3] == shape and not cut.is_padded
  return (layout, blocks) if same else None


def encode_chunks(
  payloads: PyTree,
  *,
  op: _block_op.BlockOp,
  like: ShapedLike,
  layout: _block_op.BlockLayout,
  blocks: int,
) -> PyTree:
  """Encodes the mean of several workers' payloads, some blocks at a time."""
  workers = jax.tree.leaves(payloads)[0].shape[0]
  shape = layout.planes, blocks, layout.width
  part_like = jax.ShapeDtypeStruct(shape, like.dtype)
  part_leaves, tree = jax.tree.flatten(
    _block_op.describe_payload(op, part_like)
  )
  shapes = [layout.leaf_shape(leaf) for leaf in op.leaf_layouts()]
  every = [
    a.reshape(workers, *s)
    for a, s in zip(jax.tree.leaves(payloads), shapes, strict=True)
  ]

  def average(payloads: PyTree) -> Array:
    total = _error_memory.sum_decoded(op.decode, payloads, part_like)
    return (total / workers).astype(like.dtype)

  def encode_next(number: Any, done: list[Array]) -> list[Array]:
    """Encodes the mean of one chunk and writes it among those done."""
    # The last blocks may overlap those before: the same bits again.
    start = jnp.minimum(number * blocks, layout.blocks - blocks)
    part = [
      lax.dynamic_slice_in_dim(a, start, blocks, 2).reshape(workers, *p.shape)
      for a, p in zip(every, part_leaves, strict=True)
    ]
    payload = op.encode(
      hosts.write_apart(average, jax.tree.unflatten(tree, part)), None
    )
    return [
      lax.dynamic_update_slice_in_dim(
        d, e.reshape(d.shape[0], blocks, *d.shape[2:]), start, 1
      )
      for d, e in zip(done, jax.tree.leaves(payload), strict=True)
    ]

  # The first worker's payload has the right shapes, and varies over the mesh
  # axes that the mean varies over. It is overwritten.
  first = [a[0] for a in every]
  count = -(-layout.blocks // blocks)
  done = lax.fori_loop(0, count, encode_next, first)
  whole = jax.tree.leaves(_block_op.describe_payload(op, like))
  return jax.tree.unflatten(
    tree, [d.reshape(w.shape) for d, w in zip(done, whole, strict=True)]
  )


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
  decode_sent = lambda payload, like: decode_pass(payload, op=op, like=like)
  shape = op.decoded_shape(tuple(x.shape))
  v = _error_memory.add_error_in_blocks(decode_sent, x, memory, decay, shape)
  return core.trace_in_place(op.encode)(v, key), v


def decode_pass(
  payload: PyTree, *, op: _block_op.BlockOp, like: ShapedLike
) -> Array:
  """Decodes a payload with the op's reference."""
  shape = op.decoded_shape(tuple(like.shape))
  decode = core.trace_in_place(op.decode)
  return _block_layout.read_blocks(decode, payload, shape, like)


def sum_decoded(
  payloads: PyTree, *, op: _block_op.BlockOp, like: ShapedLike
) -> Array:
  """Decodes the payloads of several workers and adds them in their order."""
  add_up = functools.partial(_error_memory.sum_decoded, op.decode)
  shape = op.decoded_shape(tuple(like.shape))
  return _block_layout.read_blocks(add_up, payloads, shape, like)


def encode_mean(
  payloads: PyTree,
  key: core.Key | None,
  *,
  op: _block_op.BlockOp,
  like: ShapedLike,
) -> PyTree:
  """Decodes the payloads of several workers and encodes their mean."""
  found = find_chunk(op, payloads, like)
  if found is None:
    return op.encode(_average(payloads, op, like), key)
  layout, blocks = found
  in_chunks = functools.partial(
    encode_chunks, op=op, like=like, layout=layout, blocks=blocks
  )

  def encode_whole(payloads: PyTree) -> PyTree:
    return op.encode(_average(payloads, op, like), key)

  return hosts.choose_by_platform(payloads, cpu=in_chunks, default=encode_whole)


def _average(
  payloads: PyTree, op: _block_op.BlockOp, like: ShapedLike
) -> Array:
  """Returns the mean of several workers' decoded payloads."""

  def divide(payloads: PyTree) -> Array:
    total = sum_decoded(payloads, op=op, like=like)
    return (total / jax.tree.leaves(payloads)[0].shape[0]).astype(like.dtype)

  # XLA:CPU would decode once for the scales and once for the codes. Where codes
  # are padded, that takes no vector instructions (10x).
  if math.prod(like.shape) >= MIN_APART:
    return hosts.write_apart(divide, payloads)
  return divide(payloads)
