"""Uniform quantization of blocks: evenly spaced levels, packed."""

from jaxmotion.kernels.quantize._op import (
  AbsmaxOp as AbsmaxOp,
  MinMaxOp as MinMaxOp,
  UniformOp as UniformOp,
)
