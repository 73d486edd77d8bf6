"""Random Hadamard rotations of blocks."""

from jaxmotion.kernels.rotate._op import RotateOp as RotateOp
from jaxmotion.kernels.rotate._reference import (
  flip_signs as flip_signs,
  hadamard as hadamard,
  rotate as rotate,
  rotate_back as rotate_back,
  row_shape as row_shape,
)
