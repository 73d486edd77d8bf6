"""Parts of the block passes that kernels of every device share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op

# Shape of the array whose payload shows the layout of all payloads.
_SAMPLE_SHAPE = (64, 1024)


def check_values(like: ShapedLike) -> None:
  """Raises NotImplementedError unless float32 holds all values of a dtype."""
  if jnp.promote_types(like.dtype, jnp.float32) != jnp.float32:
    raise NotImplementedError(
      f"values must fit in float32, got {jnp.dtype(like.dtype).name}"
    )


def check_mean(workers: int, like: ShapedLike) -> None:
  """Raises NotImplementedError unless a kernel's mean is the reference's."""
  # The kernel multiplies by 1 / workers, which equals the reference's division
  # for a power of two of workers only. An array of the mean never exists, so
  # its dtype must be the float32 of the registers.
  if workers & (workers - 1) or like.dtype != jnp.float32:
    raise NotImplementedError(
      "the mean must be float32, of a power of two of workers, got "
      f"{jnp.dtype(like.dtype).name} of {workers}"
    )


def describe_payload(op: _block_op.BlockOp, like: ShapedLike) -> PyTree:
  """Returns the payload of an array, its leaves as ShapeDtypeStructs."""
  # A program has arrays of many shapes, and to trace an encoder takes 10 ms. So
  # where the payload of one sample is laid out in blocks, only the sample is
  # traced.
  return _describe(op, tuple(like.shape), jnp.dtype(like.dtype).name)


@functools.lru_cache(maxsize=4096)
def _describe(
  op: _block_op.BlockOp, shape: tuple[int, ...], dtype: str
) -> PyTree:
  try:
    shapes = _leaf_shapes(op, shape)
    sample_shapes = _leaf_shapes(op, _SAMPLE_SHAPE)
  except NotImplementedError:
    return _trace_payload(op, shape, dtype)
  leaves, tree = jax.tree.flatten(_trace_payload(op, _SAMPLE_SHAPE, dtype))
  if [leaf.shape for leaf in leaves] != sample_shapes:
    return _trace_payload(op, shape, dtype)
  pairs = zip(leaves, shapes, strict=True)
  found = [jax.ShapeDtypeStruct(shape, leaf.dtype) for leaf, shape in pairs]
  return jax.tree.unflatten(tree, found)


@functools.lru_cache(maxsize=4096)
def _trace_payload(
  op: _block_op.BlockOp, shape: tuple[int, ...], dtype: str
) -> PyTree:
  found = jax.eval_shape(
    lambda x, seed: op.encode(x, core.Key(seed, seed)),
    jax.ShapeDtypeStruct(shape, dtype),
    jax.ShapeDtypeStruct((), jnp.uint32),
  )
  # The types of a map's mesh belong to this call; the shapes hold for all.
  return jax.tree.map(core.shape_dtype, found)


def _leaf_shapes(
  op: _block_op.BlockOp, shape: tuple[int, ...]
) -> list[tuple[int, ...]]:
  """Returns the shapes of a payload that is laid out in blocks."""
  layout = op.layout(shape)
  return [layout.leaf_shape(leaf) for leaf in op.leaf_layouts()]


def count_workers(payloads: PyTree) -> int:
  """Returns the number of workers whose payloads are stacked."""
  return jax.tree.leaves(payloads)[0].shape[0]


def round_decoded(y: Array, dtype: Any) -> Array:
  """Returns decoded values as the reference adds them."""
  # It decodes to the array's dtype before it adds in float32.
  return core.saturate_cast(y, dtype).astype(jnp.float32)


def op_name(op: _block_op.BlockOp) -> str:
  """Returns the name of an op in the names of its kernels."""
  return type(op).__name__.removesuffix("Op").lower()
