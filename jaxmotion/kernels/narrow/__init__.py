"""Casts to narrow floats, and truncation to leading bytes."""

from jaxmotion.kernels.narrow._api import (
  cast_decode as cast_decode,
  cast_encode as cast_encode,
  cast_sum as cast_sum,
  truncate_decode as truncate_decode,
  truncate_encode as truncate_encode,
  truncate_sum as truncate_sum,
)
