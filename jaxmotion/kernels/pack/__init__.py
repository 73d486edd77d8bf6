"""Bit fields into 32-bit words and back."""

from jaxmotion.kernels.pack._api import (
  pack as pack,
  pack_flat as pack_flat,
  unpack as unpack,
  unpack_flat as unpack_flat,
)
from jaxmotion.kernels.pack._reference import (
  fields as fields,
  planes as planes,
  unpack_values as unpack_values,
)
from jaxmotion.kernels.pack._tile import (
  pack_tile as pack_tile,
  piece_rows as piece_rows,
  unpack_tile as unpack_tile,
)
