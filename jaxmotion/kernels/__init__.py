"""Packing: one op a folder, one reference each, plain and fused by XLA."""

from jaxmotion.kernels._blocks import nearest_block as nearest_block
