"""Sign quantization: one bit per element and a mean magnitude per block."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels._block_layout import (
  block_counts,
  from_blocks,
  scale_axes,
  sum_magnitudes,
  to_blocks,
)
from jaxmotion.kernels.pack._reference import pack, unpack_to_float


class Signs(NamedTuple):
  """Payload of packed signs and mean magnitudes.

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
    block: maximum number of elements under one scale.
  """
  b = to_blocks(x, 32, block)
  scale = _mean_magnitude(b, x.shape, block)
  return Signs(pack((b < 0).astype(jnp.uint32), 1), scale[..., 0])


def _mean_magnitude(b: Array, shape: tuple[int, ...], block: int) -> Array:
  """Returns the mean |b| under each scale, without the padding."""
  axes = scale_axes(math.prod(shape), block)
  counts = block_counts(shape, b.shape[0], block)
  padding = math.prod(b.shape[a] for a in axes) - counts
  total = sum_magnitudes(b, axes)
  if padding.any():
    # Taken off again rather than masked: a mask before the sum is slow on
    # XLA:CPU. A scale that is all padding is nobody's.
    total = total - padding * jnp.abs(b[-1:, -1:, -1:])
  return jnp.maximum(total, 0.0) / counts.clip(1)


def sign_decode(payload: Signs, like: ShapedLike) -> Array:
  """Returns plus or minus the block's mean magnitude."""
  bits = unpack_to_float(payload.words, 1)
  return from_blocks(sign_values(bits, payload.scale[..., None]), like)


def sign_values(bits: Array, scale: Array) -> Array:
  """Returns scale for a bit of 0 and -scale for 1, float32."""
  return (1.0 - 2.0 * bits) * scale
