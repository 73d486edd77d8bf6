"""Uniform quantisation of blocks, packed."""

from jaxmotion.kernels.quantize._op import (
  Absmax as Absmax,
  Minmax as Minmax,
  Uniform as Uniform,
)
from jaxmotion.kernels.quantize._reference import (
  MinMax as MinMax,
  Symmetric as Symmetric,
  absmax_decode as absmax_decode,
  absmax_encode as absmax_encode,
  minmax_decode as minmax_decode,
  minmax_encode as minmax_encode,
)
