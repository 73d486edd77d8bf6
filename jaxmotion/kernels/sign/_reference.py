"""One bit a value and a mean magnitude a block."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Like
from jaxmotion.kernels._blocks import (
  block_axes,
  block_counts,
  from_blocks,
  to_blocks,
)
from jaxmotion.kernels.pack import pack_blocks, unpack_blocks


class Signs(NamedTuple):
  """Signs and magnitudes.

  Attributes:
    words: uint32[1, blocks * width], bit i of a word from plane i.
    scale: float32[32, blocks], the mean magnitude; [1, 1] for one block.
  """

  words: Array
  scale: Array


def sign_encode(x: Array, block: int) -> Signs:
  """Packs signs (zero counts as positive) with each block's mean magnitude.

  Args:
    x: floating array of any shape.
    block: the most values under one scale.
  """
  b = to_blocks(x, 32, block)
  axes = block_axes(x.size, block)
  counts = block_counts(x.size, 32, block)
  magnitude = b
  if (counts != b.shape[2]).any():
    lane = jnp.arange(b.shape[2]).reshape(1, 1, -1)
    inside = lane < counts[..., None]
    magnitude = jnp.where(inside, magnitude, 0.0)
  total = counts.sum(keepdims=True) if len(axes) == 3 else counts
  share = jnp.asarray(1 / total.clip(1), jnp.float32)
  # Shares are summed, for a plain sum could overflow.
  scale = _sum_magnitudes(magnitude * share[..., None], axes)
  return Signs(pack_blocks((b < 0).astype(jnp.uint32), 1), scale[..., 0])


def _sum_magnitudes(x: Array, axes: tuple[int, ...]) -> Array:
  """Sums |x|, keeping the axes."""

  def add(a: Array, b: Array) -> Array:
    return jnp.abs(a) + jnp.abs(b)

  # The magnitude is taken in the reducer: XLA:CPU hands a plain reduction to a
  # library that writes its operand to memory first (5x).
  total = lax.reduce(x, jnp.float32(0), add, axes)
  return jnp.expand_dims(total, axes)


def sign_decode(payload: Signs, like: Like) -> Array:
  """Returns plus or minus the block's mean magnitude."""
  bits = unpack_blocks(payload.words, 1, payload.scale.shape[1])
  return from_blocks((1.0 - 2.0 * bits) * payload.scale[..., None], like)
