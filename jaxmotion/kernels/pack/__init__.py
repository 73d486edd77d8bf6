"""Bit packing: codes of any width into 32-bit words and back."""

from jaxmotion.kernels.pack._api import (
  pack as pack,
  pack_flat as pack_flat,
  unpack as unpack,
  unpack_flat as unpack_flat,
)
from jaxmotion.kernels.pack._reference import (
  field_widths as field_widths,
  num_planes as num_planes,
  unpack_to_float as unpack_to_float,
)
from jaxmotion.kernels.pack._tile import (
  pack_tile as pack_tile,
  piece_rows as piece_rows,
  unpack_tile as unpack_tile,
)
