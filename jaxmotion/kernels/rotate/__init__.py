"""Random Hadamard rotations of rows, alone and before a block op."""

from jaxmotion.kernels.rotate._op import (
  RotateOp as RotateOp,
  rotate as rotate,
  rotate_back as rotate_back,
)
