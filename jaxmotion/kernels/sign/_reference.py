"""One bit a value and a mean magnitude a block."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.core import Array, Like
from jaxmotion.kernels._blocks import (
  block_axes,
  block_counts,
  from_blocks,
  sum_magnitudes,
  to_blocks,
)
from jaxmotion.kernels.pack import pack, unpack_values


class Signs(NamedTuple):
  """Signs and magnitudes.

  Attributes:
    words: uint32[1, blocks, width], bit i of a word from plane i.
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
  total = sum_magnitudes(b, block_axes(x.size, block))
  scale = total / block_counts(x.shape, 32, block)
  return Signs(pack((b < 0).astype(jnp.uint32), 1), scale[..., 0])


def sign_decode(payload: Signs, like: Like) -> Array:
  """Returns plus or minus the block's mean magnitude."""
  bits = unpack_values(payload.words, 1)
  return from_blocks((1.0 - 2.0 * bits) * payload.scale[..., None], like)
