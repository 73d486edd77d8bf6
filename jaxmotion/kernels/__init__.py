"""Packing: one op a folder, one reference each, plain and fused by XLA."""

from jaxmotion.kernels._blocks import nearest_planes as nearest_planes
