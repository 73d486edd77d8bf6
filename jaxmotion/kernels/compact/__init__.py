"""Compaction: packs the marked elements of an array in their order."""

from jaxmotion.kernels.compact._api import (
  bitmap_positions as bitmap_positions,
  compact_tiles as compact_tiles,
  expand_tiles as expand_tiles,
  threshold_bitmap as threshold_bitmap,
)
from jaxmotion.kernels.compact._reference import (
  NonZeros as NonZeros,
  prefix_counts as prefix_counts,
)
