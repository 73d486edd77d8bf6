"""Sign quantization: one bit per element and a mean magnitude per block."""

from jaxmotion.kernels.sign._op import SignOp as SignOp
from jaxmotion.kernels.sign._reference import (
  Signs as Signs,
  sign_decode as sign_decode,
  sign_encode as sign_encode,
)
