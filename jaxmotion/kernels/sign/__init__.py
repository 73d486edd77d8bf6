"""Sign quantization: one bit per element and a mean magnitude per block."""

from jaxmotion.kernels.sign._op import SignOp as SignOp
