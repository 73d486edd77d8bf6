"""Sign quantization: one bit per element and a mean magnitude per block."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_op
from jaxmotion.kernels.pack import _reference


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
  scale = _mean_magnitude(x, block)
  codes = [
    (s, (b < 0).astype(jnp.uint32))
    for s, b in _block_op.cut_planes(x, 32, block)
  ]
  return Signs(_reference.pack_cut(codes, 1), scale[..., 0])


def _mean_magnitude(x: Array, block: int) -> Array:
  """Returns the mean |b| under each scale, without the padding."""
  counts = _block_op.block_counts(x.shape, 32, block)
  total = _block_op.reduce_blocks(
    x, 32, block, _block_op.sum_magnitudes, past_end=0.0
  )
  return total / counts.clip(1)


def sign_decode(payload: Signs, like: ShapedLike) -> Array:
  """Returns plus or minus the block's mean magnitude."""
  bits = _reference.unpack_to_float(payload.words, 1)
  return _block_op.from_blocks(
    sign_values(bits, payload.scale[..., None]), like
  )


def sign_values(bits: Array, scale: Array) -> Array:
  """Returns scale for a bit of 0 and -scale for 1, float32."""
  return (1.0 - 2.0 * bits) * scale
