"""Compaction: the marked entries of an array, packed in order."""

from jaxmotion.kernels.compact._reference import (
  compact as compact,
  expand as expand,
  mark as mark,
  select as select,
  starts as starts,
)
