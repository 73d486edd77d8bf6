"""The payload of compaction: non-zero words of tiles, and their bitmaps."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.core import Array


class NonZeros(NamedTuple):
  """Payload of the non-zero words of each tile, and where they stood.

  Attributes:
    mask: uint32[tiles, tile / 32], bit i of word g is word 32 g + i of the
      tile.
    words: uint8, uint16 or uint32[tiles, capacity], in order, zeros after the
      last.
    count: uint32[tiles], number of non-zero words; if it is more than the
      capacity, the last ones were dropped.
  """

  mask: Array
  words: Array
  count: Array  # type: ignore[assignment]

  @property
  def overflow(self) -> Array:
    """Number of dropped words of all tiles, uint32[]."""
    capacity = self.words.shape[-1]
    dropped = jnp.maximum(self.count, capacity) - capacity
    return jnp.sum(dropped, axis=-1, dtype=jnp.uint32)
