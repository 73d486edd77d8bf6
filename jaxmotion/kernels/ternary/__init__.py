"""Ternary quantization: three levels per element, packed in base 3."""

from jaxmotion.kernels.ternary._op import TernaryOp as TernaryOp
