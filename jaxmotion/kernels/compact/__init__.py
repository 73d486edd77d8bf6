"""Compaction: the marked entries of an array, packed in order."""

from jaxmotion.kernels.compact._api import (
  compact_tiles as compact_tiles,
  expand_tiles as expand_tiles,
  mark as mark,
  select as select,
)
from jaxmotion.kernels.compact._reference import starts as starts
from jaxmotion.kernels.compact._tiles import NonZeros as NonZeros
