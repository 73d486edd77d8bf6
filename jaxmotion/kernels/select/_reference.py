"""The largest values of every block."""

import math

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Like

# Up to this many, one reduction each; beyond, a sort of every block.
_REDUCE_MOST = 8


def topk_select(x: Array, k: int, block: int) -> tuple[Array, Array]:
  """Selects the k values of largest magnitude in every contiguous block.

  NaN counts as larger than infinity. Of equal magnitudes negative ones come
  first, then the one that stands first.

  Args:
    x: floating array of any shape, padded with zeros to whole blocks.
    k: values kept of each block.
    block: values in a block.

  Returns:
    values f32[blocks, k] and positions in the block uint32[blocks, k].

  Example:
    >>> values, positions = topk_select(jnp.array([1.0, -3.0, 2.0, 0.5]), 1, 2)
    >>> values[:, 0].tolist(), positions[:, 0].tolist()
    ([-3.0, 2.0], [1, 0])
  """
  keys = _keys(_rows(x, block))
  if k > _REDUCE_MOST:
    top, positions = lax.top_k(keys, k)
    return _values(top), positions.astype(jnp.uint32)
  found = [_largest(keys, None)]
  for _ in range(k - 1):
    found.append(_largest(keys, found[-1]))
  top, positions = (jnp.stack(a, axis=1) for a in zip(*found, strict=True))
  return _values(top), positions


def topk_scatter(
  values: Array, positions: Array, like: Like, block: int
) -> Array:
  """Puts selected values back where they stood, zeros elsewhere.

  Args:
    values: f32[blocks, k].
    positions: uint32[blocks, k], all different in a row.
    like: shape and dtype of the result.
    block: values in a block.
  """
  blocks, k = values.shape
  if k > _REDUCE_MOST:
    rows = jnp.arange(blocks)[:, None]
    dense = jnp.zeros((blocks, block), jnp.float32)
    dense = dense.at[rows, positions].set(values)
  else:
    # Compare and select fuses into whatever reads the result; a scatter does
    # not, and writes the zeros in a pass of its own.
    lane = lax.broadcasted_iota(jnp.uint32, (blocks, block), 1)
    dense = jnp.zeros((blocks, block), jnp.float32)
    for i in range(k):
      dense = jnp.where(
        lane == positions[:, i, None], values[:, i, None], dense
      )
  size = math.prod(like.shape)
  flat = dense.reshape(-1)
  flat = flat if flat.size == size else flat[:size]
  return flat.reshape(like.shape).astype(like.dtype)


def _rows(x: Array, block: int) -> Array:
  flat = x.reshape(-1).astype(jnp.float32)
  padding = -x.size % block
  return jnp.pad(flat, (0, padding)).reshape(-(-x.size // block), block)


def _keys(x: Array) -> Array:
  """Orders floats by magnitude: the sign moves to the lowest bit."""
  u = lax.bitcast_convert_type(x, jnp.uint32)
  return (u << 1) | (u >> 31)


def _values(keys: Array) -> Array:
  return lax.bitcast_convert_type((keys >> 1) | (keys << 31), jnp.float32)


def _before(k1: Array, i1: Array, k2: Array, i2: Array) -> Array:
  return (k1 > k2) | ((k1 == k2) & (i1 < i2))


def _largest(
  keys: Array, after: tuple[Array, Array] | None
) -> tuple[Array, Array]:
  """The first (key, position) of each row in order, or the next one."""
  position = lax.broadcasted_iota(jnp.uint32, keys.shape, 1)
  if after is not None:
    key, i = (a[:, None] for a in after)
    left = _before(key, i, keys, position)
    # A key of 0 at the end of the row loses against every entry left.
    keys = jnp.where(left, keys, jnp.uint32(0))
    position = jnp.where(left, position, jnp.uint32(keys.shape[1]))

  def first(a, b):  # type: ignore[no-untyped-def]
    p = _before(*a, *b)
    return jnp.where(p, a[0], b[0]), jnp.where(p, a[1], b[1])

  # One reduction over pairs: a maximum and then a search costs 3x as much.
  return lax.reduce(
    (keys, position), (jnp.uint32(0), jnp.uint32(keys.shape[1])), first, (1,)
  )
