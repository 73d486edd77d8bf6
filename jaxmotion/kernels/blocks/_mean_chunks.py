"""Means of payloads on a host, some blocks at a time.

XLA:CPU either decodes all payloads twice, for the scales and for the codes, or
writes the mean to memory. Beyond 32 MiB that memory is fresh pages at every
step (2 to 4x). A mean of some blocks stays in a cache and in the same pages.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op, _error_memory
from jaxmotion.kernels.blocks import _passes

MIN_APART = 1 << 15
"""Elements from which a mean is written to memory; fewer are one expression."""

# Larger arrays are a loop over buffers of _CHUNK elements.
_MAX_APART, _CHUNK = 1 << 22, 1 << 19


def find_chunk(
  op: _block_op.BlockOp, payloads: PyTree, like: ShapedLike
) -> tuple[_block_op.BlockLayout, int] | None:
  """Returns the layout of an array and the blocks of a plane to take at
  once."""
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
  workers = _passes.count_workers(payloads)
  shape = layout.planes, blocks, layout.width
  part_like = jax.ShapeDtypeStruct(shape, like.dtype)
  part_leaves, tree = jax.tree.flatten(_passes.describe_payload(op, part_like))
  shapes = [layout.leaf_shape(leaf) for leaf in op.leaf_layouts()]
  every = [
    a.reshape(workers, *s)
    for a, s in zip(jax.tree.leaves(payloads), shapes, strict=True)
  ]

  def average(payloads: PyTree) -> Array:
    total = _error_memory.sum_decoded(op.decode, payloads, part_like)
    return (total / workers).astype(like.dtype)

  def encode_next(number: Any, done: list[Array]) -> list[Array]:
    # The last blocks may overlap those before: the same bits again.
    start = jnp.minimum(number * blocks, layout.blocks - blocks)
    part = [
      lax.dynamic_slice_in_dim(a, start, blocks, 2).reshape(workers, *p.shape)
      for a, p in zip(every, part_leaves, strict=True)
    ]
    payload = op.encode(
      core.write_apart(average, jax.tree.unflatten(tree, part)), None
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
  whole = jax.tree.leaves(_passes.describe_payload(op, like))
  return jax.tree.unflatten(
    tree, [d.reshape(w.shape) for d, w in zip(done, whole, strict=True)]
  )
