"""Ternary quantization: three levels per element, packed in base 3."""

from jaxmotion.kernels.ternary._op import TernaryOp as TernaryOp
from jaxmotion.kernels.ternary._reference import (
  Trits as Trits,
  pack_trits as pack_trits,
  ternary_decode as ternary_decode,
  ternary_encode as ternary_encode,
  unpack_trits as unpack_trits,
)
