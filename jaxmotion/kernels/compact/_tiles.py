"""What tiles are compacted to."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.core import Array


class NonZeros(NamedTuple):
  """The words of each tile that are not zero, and where they stood.

  Attributes:
    mask: uint32[tiles, tile / 32], bit i of word g is word 32 g + i of the
      tile.
    words: uint8, uint16 or uint32[tiles, capacity], in order, zeros after the
      last.
    count: uint32[tiles], words that are not zero; more than the capacity means
      that the last ones were dropped.
  """

  mask: Array
  words: Array
  count: Array  # type: ignore[assignment]

  @property
  def overflow(self) -> Array:
    """How many words were dropped, of all tiles, uint32[]."""
    room = self.words.shape[-1]
    dropped = jnp.maximum(self.count, room) - room
    return jnp.sum(dropped, axis=-1, dtype=jnp.uint32)
