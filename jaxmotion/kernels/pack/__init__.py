"""Bit fields into 32-bit words and back."""

from jaxmotion.kernels.pack._reference import (
  fields as fields,
  pack as pack,
  pack_blocks as pack_blocks,
  pack_flat as pack_flat,
  planes as planes,
  unpack as unpack,
  unpack_blocks as unpack_blocks,
  unpack_flat as unpack_flat,
)
