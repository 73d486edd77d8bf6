"""Hadamard rotations of blocks."""

from jaxmotion.kernels.rotate._reference import (
  flip_signs as flip_signs,
  hadamard as hadamard,
)
