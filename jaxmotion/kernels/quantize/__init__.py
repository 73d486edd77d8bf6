"""Uniform quantization of blocks: evenly spaced levels, packed."""

from jaxmotion.kernels.quantize._op import (
  AbsmaxOp as AbsmaxOp,
  MinMaxOp as MinMaxOp,
  UniformOp as UniformOp,
)
from jaxmotion.kernels.quantize._reference import (
  MinMax as MinMax,
  Symmetric as Symmetric,
  absmax_decode as absmax_decode,
  absmax_encode as absmax_encode,
  minmax_decode as minmax_decode,
  minmax_encode as minmax_encode,
)
