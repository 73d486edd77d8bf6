"""Packing: one op a folder, one reference each, plain and fused by XLA."""
