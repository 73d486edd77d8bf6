"""Bit packing: codes of any width into 32-bit words and back."""

from jaxmotion.kernels.pack._api import (
  pack_flat as pack_flat,
  unpack_flat as unpack_flat,
)
